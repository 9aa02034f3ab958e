// A parallel loop on somebody else's thread pool.
#ifndef FKL_FFI_CPU_PARALLEL_H_
#define FKL_FFI_CPU_PARALLEL_H_

#include <immintrin.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>

namespace fkl {

// Flush-to-zero and denormals-are-zero for the life of the object: without it the results would
// depend on the thread that happens to run a task (XLA's pool has both on), and denormals cost over
// 100 cycles each on some CPUs.
class FlushDenormals {
 public:
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(saved_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  unsigned saved_;
};

// Where the loops of one call run.
struct Executor {
  int num_workers = 1;  // including the calling thread
  std::function<void(std::function<void()>)> schedule;
};

// Moves the calling thread off `cpu` if that is where it runs and it may run elsewhere.
inline void LeaveCpu(int cpu) {
  cpu_set_t allowed;
  if (sched_getcpu() != cpu || sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  cpu_set_t others = allowed;
  CPU_CLR(cpu, &others);
  if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof others, &others) != 0) return;
  sched_setaffinity(0, sizeof allowed, &allowed);
}

// Calls body(task, worker) for every task in [0, num_tasks), started in this order; worker <
// executor.num_workers, and no two tasks share a worker number at one time. The caller works too
// and never waits for a helper that has not started, so that a busy pool cannot block it. The first
// exception of a task is thrown again here.
//
// On machines of few cores Linux often queues a woken thread behind the one that woke it and leaves
// it there for 4 to 8 ms with other cores idle. So if no helper has started when the caller has done
// its first task, the caller sleeps, for as long again and at most 100 us: that lets such a helper
// run, and the helper moves to another core.
template <class Body>
void ParallelFor(const Executor& executor, int64_t num_tasks, const Body& body) {
  const int num_workers = static_cast<int>(std::min<int64_t>(executor.num_workers, num_tasks));
  if (num_workers <= 1) {
    FlushDenormals flush;
    for (int64_t task = 0; task < num_tasks; ++task) body(task, 0);
    return;
  }
  typedef std::chrono::steady_clock Clock;
  struct Shared {  // outlives this call: a helper that starts late touches nothing else
    std::atomic<int64_t> next{0}, done{0};
    std::atomic<int> worker{0};
    std::mutex mutex;
    std::condition_variable all_done, helper_started;
    std::exception_ptr error;
  };
  auto shared = std::make_shared<Shared>();
  const Body* tasks = &body;
  const int caller_cpu = sched_getcpu();
  const auto work = [shared, num_tasks, tasks, caller_cpu] {
    if (shared->next.load() >= num_tasks) return;
    FlushDenormals flush;
    const int worker = shared->worker.fetch_add(1);
    if (worker == 1) {  // before it leaves: who is woken comes to the CPU of who wakes
      std::lock_guard<std::mutex> lock(shared->mutex);
      shared->helper_started.notify_all();
    }
    if (worker > 0) LeaveCpu(caller_cpu);
    const auto start = Clock::now();
    bool may_wait = worker == 0;
    for (int64_t task; (task = shared->next.fetch_add(1)) < num_tasks;) {
      try {
        (*tasks)(task, worker);
      } catch (...) {
        std::lock_guard<std::mutex> lock(shared->mutex);
        if (!shared->error) shared->error = std::current_exception();
      }
      if (shared->done.fetch_add(1) + 1 == num_tasks) {
        std::lock_guard<std::mutex> lock(shared->mutex);
        shared->all_done.notify_all();
      }
      if (may_wait && shared->worker.load() == 1) {
        const auto patience = std::min<Clock::duration>(Clock::now() - start, std::chrono::microseconds(100));
        std::unique_lock<std::mutex> lock(shared->mutex);
        shared->helper_started.wait_for(lock, patience, [&] { return shared->worker.load() > 1; });
      }
      may_wait = false;
    }
  };
  for (int helper = 1; helper < num_workers; ++helper) executor.schedule(work);
  work();
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->all_done.wait(lock, [&] { return shared->done.load() == num_tasks; });
  if (shared->error) std::rethrow_exception(shared->error);
}

}  // namespace fkl

#endif  // FKL_FFI_CPU_PARALLEL_H_
