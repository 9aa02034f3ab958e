// The backward pass.
//
// A task is (outer element, kv head, part of the head's group, part of the keys). It goes through
// its query heads; for each it copies Q (scaled), dO, the LSE and delta = rowsum(dout * out) - dlse
// once, then, key tile by key tile and query tile by query tile, recomputes the scores and
// probabilities and adds
//   dV += P^T dO,  dS = P * (dO V^T - delta), through the score program's derivative,  dK += dS^T
//   Q,  dQ += dS K.
// Sums that several tasks contribute to are kept per task and added up in a fixed order at the end,
// so that results are bitwise repeatable; only large gradients of bias and captured arrays may use
// atomic additions, and not when the call is `deterministic`.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "cpu/attention_cpu.h"
#include "cpu/mask_plan.h"
#include "cpu/tile_product.h"
#include "cpu/workspace.h"

namespace fkl {
namespace {

constexpr int kTileRows = 96;
constexpr int kTileColumns = 64;  // a row's live columns fit one 64-bit word
constexpr int kPackRows = 16;     // rows converted at a time where the copy is not kept
constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr double kSerialFlops = 2e6;                  // below, handing out work costs more than it saves
constexpr int kTasksPerWorker = 4;                    // fewer leave workers idle at the end
constexpr int kMaxKeyParts = 4;                       // each part more packs the queries once more
constexpr int64_t kPrivateFloats = int64_t{1} << 24;  // bound of all per-task copies of one kind of sum

// How contributions of several tasks to one array come together.
enum class Sharing {
  kDirect,   // each element belongs to one task, or there is one worker
  kPrivate,  // a copy per task, added up in order
  kAtomic
};

struct Task {
  int64_t number;
  int64_t outer;
  int kv_head;
  int first_head, num_heads;  // query heads
  int group_part, key_part;
};

class BackwardCall {
 public:
  BackwardCall(const AttentionProblem& problem, const BackwardOperands& operands, const BackwardResults& results,
               const Executor& executor);
  void Run();

 private:
  struct Worker {
    float *query, *dout;     // [q_seq_len][query_stride_], [q_seq_len][value_stride_]
    float *neg_lse, *delta;  // [q_seq_len]
    float* dquery;           // [q_seq_len][query_stride_]
    float *dkeys,
        *dvalues;  // [keys][query_stride_], [keys][value_stride_]: a tile's, or all of the head's
    float *key_panels, *value_panels, *keys;
    float *probs, *dprobs;  // [kTileRows][kTileColumns]
    float* rows_buffer;     // [kPackRows][widest row]
    uint8_t* nonfinite;     // by query tile: Q or dO has a NaN or infinity
    TileRow* rows;
    Strip* strips;
    std::vector<LiveTile> live_tiles;
    std::vector<CaptureGrad> capture_grads;
    std::unique_ptr<ProgramRunner> score, mask;
  };
  // One pair of tiles.
  struct Tile {
    int64_t outer;
    int head;
    int64_t q_begin, kv_begin;
    int num_q, num_kv;
    unsigned mixed;
    bool has_nonfinite;
    float *dkeys, *dvalues, *dbias;
  };

  void SplitWork();
  void ChooseSharing();
  void ReserveMemory();
  void MakeWorkers();
  void ClearResults();
  Task TaskOf(int64_t number) const;
  void RunTask(Worker& worker, const Task& task);
  void BeginHead(Worker& worker, const Task& task, int head);
  void VisitTile(Worker& worker, const Tile& tile);
  void ScoreGradients(Worker& worker, const Tile& tile, const TileRow* rows);
  void AddBiasGradient(const Tile& tile, int q, const float* dscores, int begin, int end) const;
  void AccumulateProducts(Worker& worker, const Tile& tile, bool is_mixed);
  void AccumulateSkippingDead(Worker& worker, const Tile& tile);
  void FinishHead(Worker& worker, const Task& task, int head, const float* dquery, double* dscale);
  void StoreKeys(int64_t outer, int kv_head, int64_t kv_begin, int num_kv, const float* dkeys, const float* dvalues);
  void ReduceQueries();
  void ReduceKeys();
  void ReduceOthers();
  float* PartialQueries(int key_part, int64_t outer, int head) const;
  float* PartialKeys(int group_part, int64_t outer, int kv_head) const;

  const AttentionProblem& p_;
  const BackwardOperands& operands_;
  const BackwardResults& results_;
  const IsaKernels& isa_;
  Executor executor_;
  MaskPlan plan_;
  bool needs_dscores_, needs_dquery_, needs_dkey_, needs_dvalue_, needs_dcaptures_ = false;
  int64_t query_stride_, value_stride_;
  int64_t num_kv_tiles_, kv_padded_, num_q_tiles_;
  int key_parts_ = 1, group_parts_ = 1, heads_per_part_ = 1;
  bool keeps_head_keys_ = false;  // dK and dV of a whole head until all its query heads are done
  Sharing bias_sharing_ = Sharing::kDirect, capture_sharing_ = Sharing::kDirect;
  int64_t bias_size_ = 0;               // of one outer element's part of dbias
  std::vector<int64_t> capture_sizes_;  // 0: not asked for
  int64_t captures_size_ = 0;
  int64_t num_tasks_ = 0;

  Workspace workspace_;
  struct {
    size_t query, dout, neg_lse, delta, dquery, dkeys, dvalues, key_panels, value_panels, keys, probs, dprobs,
        rows_buffer, nonfinite, rows, strips, partial_queries, partial_keys, dscale, private_bias, private_captures;
  } at_;
  std::vector<Worker> workers_;
};

BackwardCall::BackwardCall(const AttentionProblem& problem, const BackwardOperands& operands,
                           const BackwardResults& results, const Executor& executor)
    : p_(problem), operands_(operands), results_(results), isa_(*problem.isa), executor_(executor), plan_(problem) {
  for (int i = 0; i < p_.num_captures; ++i) {
    int64_t size = 0;
    if (results_.dcaptures[static_cast<size_t>(i)]) {
      size = 1;
      const Capture& capture = p_.captures[static_cast<size_t>(i)];
      for (int axis = 0; axis < capture.rank; ++axis) size *= capture.dims[axis];
      needs_dcaptures_ = needs_dcaptures_ || size > 0;
    }
    capture_sizes_.push_back(size);
    captures_size_ += size;
  }
  needs_dquery_ = results_.dquery || results_.dscale;
  needs_dkey_ = bool(results_.dkey);
  needs_dvalue_ = bool(results_.dvalue);
  needs_dscores_ = needs_dquery_ || needs_dkey_ || results_.dbias || needs_dcaptures_;
  query_stride_ = RoundUp(p_.head_dim, isa_.vector_width);
  value_stride_ = RoundUp(p_.value_head_dim, isa_.vector_width);
  num_kv_tiles_ = CeilDiv(p_.kv_seq_len, kTileColumns);
  kv_padded_ = num_kv_tiles_ * kTileColumns;
  num_q_tiles_ = CeilDiv(p_.q_seq_len, kTileRows);
  if (results_.dbias) {
    const auto axis = [](int64_t stride, int64_t size) { return stride != 0 ? size : 1; };
    bias_size_ = axis(p_.bias_strides.head, p_.num_q_heads) * axis(p_.bias_strides.row, p_.q_seq_len) *
                 axis(p_.bias_strides.column, p_.kv_seq_len);
  }
  const double flops = 5.0 * static_cast<double>(p_.num_outer() * p_.num_q_heads) * static_cast<double>(p_.q_seq_len) *
                       static_cast<double>(p_.kv_seq_len) * (p_.head_dim + p_.value_head_dim);
  if (flops < kSerialFlops) executor_.num_workers = 1;
  SplitWork();
  ChooseSharing();
}

// Cuts heads further when there are too few to keep the workers busy: first a kv head's group of
// query heads, whose shared sums (dK and dV) are small, then the keys.
void BackwardCall::SplitWork() {
  const int64_t num_heads = p_.num_outer() * p_.num_kv_heads;
  const int64_t wanted = executor_.num_workers > 1 ? int64_t{kTasksPerWorker} * executor_.num_workers : 1;
  const auto parts = [&](int64_t tasks, int64_t most, int64_t floats_per_part) {
    const int64_t affordable = kPrivateFloats / std::max<int64_t>(floats_per_part, 1);
    const int64_t useful = CeilDiv(wanted, std::max<int64_t>(tasks, 1));
    return static_cast<int>(std::max<int64_t>(1, std::min({useful, most, affordable})));
  };
  const int group = p_.group_size();
  group_parts_ = parts(num_heads, group, num_heads * kv_padded_ * (query_stride_ + value_stride_));
  heads_per_part_ = static_cast<int>(std::max<int64_t>(CeilDiv(group, group_parts_), 1));
  group_parts_ = static_cast<int>(std::max<int64_t>(CeilDiv(group, heads_per_part_), 1));
  key_parts_ = parts(num_heads * group_parts_, std::clamp<int64_t>(num_kv_tiles_, 1, kMaxKeyParts),
                     p_.num_outer() * p_.num_q_heads * p_.q_seq_len * query_stride_);
  keeps_head_keys_ = group != 1;
  num_tasks_ = num_heads * group_parts_ * key_parts_;
}

void BackwardCall::ChooseSharing() {
  bias_sharing_ = capture_sharing_ = Sharing::kDirect;
  if (executor_.num_workers == 1) return;
  if (results_.dbias) {
    const OuterOffsets& offsets = results_.dbias.offsets;
    const bool is_one_outer = p_.num_outer() == 1 || (offsets.table.empty() && offsets.step != 0);
    const bool is_one_head =
        p_.bias_strides.head != 0 || p_.num_q_heads == 1 || (p_.num_kv_heads == 1 && group_parts_ == 1);
    const bool is_one_part = p_.bias_strides.column != 0 || key_parts_ == 1;
    if (!(is_one_outer && is_one_head && is_one_part)) {
      bias_sharing_ = num_tasks_ * bias_size_ <= kPrivateFloats ? Sharing::kPrivate : Sharing::kAtomic;
    }
  }
  if (needs_dcaptures_) {
    capture_sharing_ = num_tasks_ * captures_size_ <= kPrivateFloats ? Sharing::kPrivate : Sharing::kAtomic;
  }
  if (p_.deterministic && (bias_sharing_ == Sharing::kAtomic || capture_sharing_ == Sharing::kAtomic)) {
    executor_.num_workers = 1;  // one worker adds in the order of the tasks
    SplitWork();
    bias_sharing_ = capture_sharing_ = Sharing::kDirect;
  }
}

void BackwardCall::ReserveMemory() {
  const int64_t n = executor_.num_workers, q_len = p_.q_seq_len;
  Workspace& w = workspace_;
  at_.query = w.Reserve<float>(n * q_len * query_stride_);
  at_.dout = w.Reserve<float>(n * q_len * value_stride_);
  at_.neg_lse = w.Reserve<float>(n * RoundUp(q_len, 16));
  at_.delta = w.Reserve<float>(n * RoundUp(q_len, 16));
  const bool sums_queries = needs_dquery_ && key_parts_ > 1;
  at_.dquery = w.Reserve<float>(needs_dquery_ && !sums_queries ? n * q_len * query_stride_ : 0);
  at_.partial_queries =
      w.Reserve<float>(sums_queries ? key_parts_ * p_.num_outer() * p_.num_q_heads * q_len * query_stride_ : 0);
  const int64_t keys_kept = !keeps_head_keys_ ? kTileColumns : group_parts_ == 1 ? kv_padded_ : 0;
  at_.dkeys = w.Reserve<float>(n * keys_kept * query_stride_);
  at_.dvalues = w.Reserve<float>(n * keys_kept * value_stride_);
  at_.partial_keys = w.Reserve<float>(group_parts_ == 1 ? 0
                                                        : group_parts_ * p_.num_outer() * p_.num_kv_heads * kv_padded_ *
                                                              (query_stride_ + value_stride_));
  at_.key_panels = w.Reserve<float>(n * kTileColumns * query_stride_);
  at_.value_panels = w.Reserve<float>(n * kTileColumns * value_stride_);
  at_.keys = w.Reserve<float>(n * kTileColumns * query_stride_);
  at_.probs = w.Reserve<float>(n * kTileRows * kTileColumns);
  at_.dprobs = w.Reserve<float>(n * kTileRows * kTileColumns);
  at_.rows_buffer = w.Reserve<float>(n * kPackRows * std::max(query_stride_, value_stride_));
  at_.nonfinite = w.Reserve<uint8_t>(n * RoundUp(num_q_tiles_, 64));
  at_.rows = w.Reserve<TileRow>(n * kTileRows);
  at_.strips = w.Reserve<Strip>(n * kTileRows);
  at_.dscale = w.Reserve<double>(num_tasks_);
  at_.private_bias = w.Reserve<float>(bias_sharing_ == Sharing::kPrivate ? num_tasks_ * bias_size_ : 0);
  at_.private_captures = w.Reserve<float>(capture_sharing_ == Sharing::kPrivate ? num_tasks_ * captures_size_ : 0);
  w.Allocate();
}

void BackwardCall::MakeWorkers() {
  const int64_t q_len = p_.q_seq_len;
  const int64_t keys_kept = !keeps_head_keys_ ? kTileColumns : group_parts_ == 1 ? kv_padded_ : 0;
  workers_.resize(static_cast<size_t>(executor_.num_workers));
  for (int64_t i = 0; i < executor_.num_workers; ++i) {
    Worker& w = workers_[static_cast<size_t>(i)];
    const auto floats = [&](size_t offset, int64_t count) { return workspace_.At<float>(offset) + i * count; };
    w.query = floats(at_.query, q_len * query_stride_);
    w.dout = floats(at_.dout, q_len * value_stride_);
    w.neg_lse = floats(at_.neg_lse, RoundUp(q_len, 16));
    w.delta = floats(at_.delta, RoundUp(q_len, 16));
    w.dquery = needs_dquery_ && key_parts_ == 1 ? floats(at_.dquery, q_len * query_stride_) : nullptr;
    w.dkeys = floats(at_.dkeys, keys_kept * query_stride_);
    w.dvalues = floats(at_.dvalues, keys_kept * value_stride_);
    w.key_panels = floats(at_.key_panels, kTileColumns * query_stride_);
    w.value_panels = floats(at_.value_panels, kTileColumns * value_stride_);
    w.keys = floats(at_.keys, kTileColumns * query_stride_);
    w.probs = floats(at_.probs, kTileRows * kTileColumns);
    w.dprobs = floats(at_.dprobs, kTileRows * kTileColumns);
    w.rows_buffer = floats(at_.rows_buffer, kPackRows * std::max(query_stride_, value_stride_));
    w.nonfinite = workspace_.At<uint8_t>(at_.nonfinite) + i * RoundUp(num_q_tiles_, 64);
    w.rows = workspace_.At<TileRow>(at_.rows) + i * kTileRows;
    w.strips = workspace_.At<Strip>(at_.strips) + i * kTileRows;
    w.capture_grads.resize(static_cast<size_t>(p_.num_captures));
    if (!p_.score.empty()) w.score = std::make_unique<ProgramRunner>(p_.score, isa_);
    if (!p_.mask.empty()) w.mask = std::make_unique<ProgramRunner>(p_.mask, isa_);
  }
}

// What tasks add to starts from zero.
void BackwardCall::ClearResults() {
  const auto clear = [&](void* data, int64_t count) {
    constexpr int64_t kChunk = int64_t{1} << 20;
    ParallelFor(executor_, CeilDiv(count, kChunk), [&](int64_t chunk, int) {
      const int64_t size = std::min(kChunk, count - chunk * kChunk);
      std::memset(static_cast<float*>(data) + chunk * kChunk, 0, sizeof(float) * static_cast<size_t>(size));
    });
  };
  if (results_.dbias) clear(results_.dbias.data, results_.dbias.size);
  for (const Result& dcapture : results_.dcaptures) {
    if (dcapture) clear(dcapture.data, dcapture.size);
  }
}

Task BackwardCall::TaskOf(int64_t number) const {
  Task task;
  task.number = number;
  task.key_part = static_cast<int>(number % key_parts_);
  task.group_part = static_cast<int>(number / key_parts_ % group_parts_);
  const int64_t head = number / key_parts_ / group_parts_;
  task.kv_head = static_cast<int>(head % p_.num_kv_heads);
  task.outer = head / p_.num_kv_heads;
  const int first = task.group_part * heads_per_part_;
  task.first_head = task.kv_head * p_.group_size() + first;
  task.num_heads = std::min(heads_per_part_, p_.group_size() - first);
  return task;
}

void BackwardCall::Run() {
  ReserveMemory();
  MakeWorkers();
  ClearResults();
  ParallelFor(executor_, num_tasks_,
              [&](int64_t number, int worker) { RunTask(workers_[static_cast<size_t>(worker)], TaskOf(number)); });
  if (key_parts_ > 1) ReduceQueries();
  if (group_parts_ > 1) ReduceKeys();
  ReduceOthers();
}

float* BackwardCall::PartialQueries(int key_part, int64_t outer, int head) const {
  const int64_t index = (key_part * p_.num_outer() + outer) * p_.num_q_heads + head;
  return workspace_.At<float>(at_.partial_queries) + index * p_.q_seq_len * query_stride_;
}

float* BackwardCall::PartialKeys(int group_part, int64_t outer, int kv_head) const {
  const int64_t index = (group_part * p_.num_outer() + outer) * p_.num_kv_heads + kv_head;
  return workspace_.At<float>(at_.partial_keys) + index * kv_padded_ * (query_stride_ + value_stride_);
}

void BackwardCall::RunTask(Worker& worker, const Task& task) {
  const int64_t q_len = p_.q_seq_len;
  const int64_t live_q = p_.QueryLength(task.outer), live_kv = p_.KeyLength(task.outer);
  const int64_t key_row = int64_t{p_.num_kv_heads} * p_.head_dim;
  const int64_t value_row = int64_t{p_.num_kv_heads} * p_.value_head_dim;
  float* head_dkeys = group_parts_ > 1 ? PartialKeys(task.group_part, task.outer, task.kv_head) : worker.dkeys;
  float* head_dvalues = group_parts_ > 1 ? head_dkeys + kv_padded_ * query_stride_ : worker.dvalues;
  const auto tile_dkeys = [&](int64_t kv_begin) {
    return keeps_head_keys_ ? head_dkeys + kv_begin * query_stride_ : worker.dkeys;
  };
  const auto tile_dvalues = [&](int64_t kv_begin) {
    return keeps_head_keys_ ? head_dvalues + kv_begin * value_stride_ : worker.dvalues;
  };
  const auto clear_keys = [&](int64_t kv_begin) {
    std::fill_n(tile_dkeys(kv_begin), kTileColumns * query_stride_, 0.0f);
    std::fill_n(tile_dvalues(kv_begin), kTileColumns * value_stride_, 0.0f);
  };
  const auto for_key_tiles = [&](auto body) {
    for (int64_t index = task.key_part; index < num_kv_tiles_; index += key_parts_) {
      const int64_t kv_begin = index * kTileColumns;
      body(kv_begin, static_cast<int>(std::min<int64_t>(kTileColumns, p_.kv_seq_len - kv_begin)));
    }
  };
  if (keeps_head_keys_) for_key_tiles([&](int64_t kv_begin, int) { clear_keys(kv_begin); });

  float* dbias = nullptr;
  if (results_.dbias) {
    dbias = static_cast<float*>(results_.dbias.Address(task.outer, 0));
    if (bias_sharing_ == Sharing::kPrivate) {
      dbias = workspace_.At<float>(at_.private_bias) + task.number * bias_size_;
      std::fill_n(dbias, bias_size_, 0.0f);
    }
  }
  if (needs_dcaptures_) {
    float* captures = workspace_.At<float>(at_.private_captures) + task.number * captures_size_;
    if (capture_sharing_ == Sharing::kPrivate) std::fill_n(captures, captures_size_, 0.0f);
    for (size_t i = 0; i < capture_sizes_.size(); captures += capture_sizes_[i], ++i) {
      worker.capture_grads[i] = {};
      if (capture_sizes_[i] == 0) continue;
      worker.capture_grads[i] = {capture_sharing_ == Sharing::kPrivate
                                     ? captures
                                     : static_cast<float*>(results_.dcaptures[i].Address(task.outer, 0)),
                                 capture_sharing_ == Sharing::kAtomic};
    }
  }
  if (worker.score) worker.score->BindCaptures(p_.CapturesOf(task.outer));
  if (worker.mask) worker.mask->BindCaptures(p_.CapturesOf(task.outer));

  double dscale = 0.0;
  for (int head = task.first_head; head < task.first_head + task.num_heads; ++head) {
    BeginHead(worker, task, head);
    float* dquery = key_parts_ > 1 && needs_dquery_ ? PartialQueries(task.key_part, task.outer, head) : worker.dquery;
    if (needs_dquery_) std::fill_n(dquery, q_len * query_stride_, 0.0f);
    worker.dquery = dquery;
    for_key_tiles([&](int64_t kv_begin, int num_kv) {
      const int num_live_kv = static_cast<int>(std::clamp<int64_t>(live_kv - kv_begin, 0, num_kv));
      plan_.LiveQueryTiles({task.outer, head, 1, 0, live_q, kv_begin, num_live_kv}, kTileRows, &worker.live_tiles);
      if (!keeps_head_keys_) clear_keys(kv_begin);
      bool has_nonfinite_key = false;
      if (!worker.live_tiles.empty()) {
        PackArgs pack = {};
        pack.dtype = p_.key.dtype;
        pack.num_rows = num_live_kv;
        pack.padded_rows = static_cast<int>(RoundUp(num_live_kv, isa_.panel_width));
        pack.scale = 1.0f;
        pack.src = p_.key.Address(task.outer, kv_begin * key_row + int64_t{task.kv_head} * p_.head_dim);
        pack.src_stride = key_row;
        pack.num_columns = p_.head_dim;
        pack.out = worker.key_panels;
        has_nonfinite_key = isa_.pack_panels(pack);
        if (needs_dquery_) {
          pack.out = worker.keys;
          pack.out_stride = query_stride_;
          isa_.pack_rows(pack);
        }
        if (needs_dscores_) {
          pack.src = p_.value.Address(task.outer, kv_begin * value_row + int64_t{task.kv_head} * p_.value_head_dim);
          pack.src_stride = value_row;
          pack.num_columns = p_.value_head_dim;
          pack.out = worker.value_panels;
          isa_.pack_panels(pack);
        }
      }
      for (const LiveTile& live : worker.live_tiles) {
        Tile tile;
        tile.outer = task.outer;
        tile.head = head;
        tile.q_begin = live.index * kTileRows;
        tile.kv_begin = kv_begin;
        tile.num_q = static_cast<int>(std::min<int64_t>(kTileRows, live_q - tile.q_begin));
        tile.num_kv = num_live_kv;
        tile.mixed = live.mixed;
        tile.has_nonfinite = has_nonfinite_key || worker.nonfinite[live.index] != 0;
        tile.dkeys = tile_dkeys(kv_begin);
        tile.dvalues = tile_dvalues(kv_begin);
        tile.dbias = dbias;
        VisitTile(worker, tile);
      }
      if (!keeps_head_keys_) {
        StoreKeys(task.outer, task.kv_head, kv_begin, num_kv, worker.dkeys, worker.dvalues);
      }
    });
    if (needs_dquery_) FinishHead(worker, task, head, dquery, &dscale);
  }
  workspace_.At<double>(at_.dscale)[task.number] = dscale;
  if (keeps_head_keys_ && group_parts_ == 1) {
    for_key_tiles([&](int64_t kv_begin, int num_kv) {
      StoreKeys(task.outer, task.kv_head, kv_begin, num_kv, tile_dkeys(kv_begin), tile_dvalues(kv_begin));
    });
  }
}

// Copies of the head's Q (scaled) and dO, and the two numbers per row. Rows that attend to nothing
// (LSE -inf) become 0, so that NaN in them goes nowhere.
void BackwardCall::BeginHead(Worker& worker, const Task& task, int head) {
  const int64_t live_q = p_.QueryLength(task.outer);
  const int64_t query_row = int64_t{p_.num_q_heads} * p_.head_dim;
  const int64_t out_row = int64_t{p_.num_q_heads} * p_.value_head_dim;
  const float* lse = operands_.lse.At<float>(task.outer) + head * p_.q_seq_len;
  const float* dlse = operands_.dlse ? operands_.dlse.At<float>(task.outer) + head * p_.q_seq_len : nullptr;
  for (int64_t tile = 0; tile * kTileRows < live_q; ++tile) {
    const int64_t begin = tile * kTileRows, end = std::min(begin + kTileRows, live_q);
    PackArgs pack = {};
    pack.dtype = p_.query.dtype;
    pack.num_rows = pack.padded_rows = static_cast<int>(end - begin);
    pack.src = p_.query.Address(task.outer, begin * query_row + int64_t{head} * p_.head_dim);
    pack.src_stride = query_row;
    pack.num_columns = p_.head_dim;
    pack.scale = p_.ScaleOf(task.outer);
    pack.out = worker.query + begin * query_stride_;
    pack.out_stride = query_stride_;
    bool has_nonfinite = isa_.pack_rows(pack);
    pack.src = operands_.dout.Address(task.outer, begin * out_row + int64_t{head} * p_.value_head_dim);
    pack.src_stride = out_row;
    pack.num_columns = p_.value_head_dim;
    pack.scale = 1.0f;
    pack.out = worker.dout + begin * value_stride_;
    pack.out_stride = value_stride_;
    has_nonfinite = isa_.pack_rows(pack) || has_nonfinite;
    worker.nonfinite[tile] = has_nonfinite;
    pack.out = worker.rows_buffer;
    for (int64_t q0 = begin; q0 < end; q0 += kPackRows) {
      pack.src = operands_.out.Address(task.outer, q0 * out_row + int64_t{head} * p_.value_head_dim);
      pack.num_rows = pack.padded_rows = static_cast<int>(std::min<int64_t>(kPackRows, end - q0));
      isa_.pack_rows(pack);
      for (int64_t q = q0; q < q0 + pack.num_rows; ++q) {
        if (lse[q] == kNegInf) {
          std::fill_n(worker.query + q * query_stride_, query_stride_, 0.0f);
          std::fill_n(worker.dout + q * value_stride_, value_stride_, 0.0f);
          worker.neg_lse[q] = kNegInf;  // exp(score - inf) = 0
          worker.delta[q] = 0.0f;
          continue;
        }
        worker.neg_lse[q] = -lse[q];
        worker.delta[q] = isa_.dot(worker.dout + q * value_stride_, worker.rows_buffer + (q - q0) * value_stride_,
                                   static_cast<int>(value_stride_));
        if (dlse != nullptr) worker.delta[q] -= dlse[q];
      }
    }
  }
  if (worker.score) worker.score->BindHead(p_.GlobalBatch(task.outer), p_.GlobalHead(task.outer, head));
}

void BackwardCall::VisitTile(Worker& worker, const Tile& tile) {
  const bool is_mixed = tile.mixed != 0;
  if (is_mixed) {
    plan_.FillRows({tile.outer, tile.head, 1, tile.q_begin, tile.num_q, tile.kv_begin, tile.num_kv}, tile.mixed,
                   worker.mask.get(), worker.rows);
    FillStrips(worker.rows, tile.num_q, isa_.strip_rows, worker.strips);
  }
  const Strip* strips = is_mixed ? worker.strips : nullptr;
  GemmArgs g = {};
  g.a = worker.query + tile.q_begin * query_stride_;
  g.a_stride = query_stride_;
  g.b = worker.key_panels;
  g.b_stride = isa_.panel_width;
  g.b_panel_stride = int64_t{isa_.panel_width} * p_.head_dim;
  g.c = worker.probs;
  g.c_stride = kTileColumns;
  g.num_rows = tile.num_q;
  g.depth = p_.head_dim;
  KeyLaneProduct(isa_, isa_.gemm_rows[kGemmOverwrite], g, strips, tile.num_kv);
  if (needs_dscores_) {
    g.a = worker.dout + tile.q_begin * value_stride_;
    g.a_stride = value_stride_;
    g.b = worker.value_panels;
    g.b_panel_stride = int64_t{isa_.panel_width} * p_.value_head_dim;
    g.c = worker.dprobs;
    g.depth = p_.value_head_dim;
    KeyLaneProduct(isa_, isa_.gemm_rows[kGemmOverwrite], g, strips, tile.num_kv);
  }
  ScoreGradients(worker, tile, is_mixed ? worker.rows : nullptr);
  if (is_mixed && tile.has_nonfinite) {
    AccumulateSkippingDead(worker, tile);
  } else {
    AccumulateProducts(worker, tile, is_mixed);
  }
}

// From scores and dP to P and dS, and the gradients of bias and captures.
void BackwardCall::ScoreGradients(Worker& worker, const Tile& tile, const TileRow* rows) {
  BackwardRowsArgs args = {};
  args.scores = args.probs = worker.probs;
  args.dprobs = needs_dscores_ ? worker.dprobs : nullptr;
  args.stride = kTileColumns;
  args.num_rows = tile.num_q;
  args.num_lanes = static_cast<int>(RoundUp(tile.num_kv, isa_.vector_width));
  args.rows = rows;
  args.neg_lse = worker.neg_lse + tile.q_begin;
  args.delta = worker.delta + tile.q_begin;
  if (!p_.bias && !worker.score) {
    isa_.backward_rows(args);
    return;
  }
  const auto kv_idx0 = static_cast<int32_t>(p_.GlobalKey(tile.outer, tile.kv_begin));
  const BroadcastStrides& strides = p_.bias_strides;
  args.num_rows = 1;
  for (int row = 0; row < tile.num_q; ++row) {
    const int64_t q = tile.q_begin + row;
    const int begin = rows ? rows[row].begin : 0, end = rows ? rows[row].end : tile.num_kv;
    const uint32_t* bits = rows ? rows[row].bits : nullptr;
    float* scores = worker.probs + row * kTileColumns;
    float* dscores = worker.dprobs + row * kTileColumns;
    args.scores = args.probs = scores;
    args.dprobs = needs_dscores_ ? dscores : nullptr;
    args.rows = rows ? rows + row : nullptr;
    args.neg_lse = worker.neg_lse + q;
    args.delta = worker.delta + q;
    if (begin < end) {
      if (p_.bias) {
        const int64_t first = tile.head * strides.head + q * strides.row + (tile.kv_begin + begin) * strides.column;
        isa_.add_bias(scores + begin, 1.0f, p_.bias.Address(tile.outer, first), p_.bias.dtype,
                      static_cast<int>(strides.column), end - begin);
      }
      if (worker.score) {
        worker.score->BindRow(static_cast<int32_t>(p_.GlobalQuery(tile.outer, q)));
        args.scores = worker.score->RunScore(scores, kv_idx0, end);
      }
    }
    isa_.backward_rows(args);
    if (begin >= end || !needs_dscores_) continue;
    if (worker.score) {
      const float* derivative = worker.score->RunDerivative(dscores, bits, end);
      if (derivative != dscores) std::memcpy(dscores, derivative, sizeof(float) * static_cast<size_t>(end));
      // The program may have run on in the last vector.
      std::fill(dscores + end, dscores + RoundUp(end, 16), 0.0f);
      if (needs_dcaptures_) worker.score->AddLoadGrads(worker.capture_grads.data(), bits, end);
    }
    if (tile.dbias != nullptr) AddBiasGradient(tile, row, dscores, begin, end);
  }
}

void BackwardCall::AddBiasGradient(const Tile& tile, int q, const float* dscores, int begin, int end) const {
  const BroadcastStrides& strides = p_.bias_strides;
  float* dst = tile.dbias + tile.head * strides.head + (tile.q_begin + q) * strides.row +
               (tile.kv_begin + begin) * strides.column;
  const bool is_atomic = bias_sharing_ == Sharing::kAtomic;
  if (strides.column == 0) {
    float sum = 0.0f;
    for (int c = begin; c < end; ++c) sum += dscores[c];
    if (is_atomic) {
      std::atomic_ref<float>(*dst).fetch_add(sum, std::memory_order_relaxed);
    } else {
      *dst += sum;
    }
  } else if (is_atomic) {
    for (int c = begin; c < end; ++c) {
      std::atomic_ref<float>(dst[c - begin]).fetch_add(dscores[c], std::memory_order_relaxed);
    }
  } else {
    isa_.add_row(dst, dscores + begin, end - begin);
  }
}

void BackwardCall::AccumulateProducts(Worker& worker, const Tile& tile, bool is_mixed) {
  // dV += P^T dO and dK += dS^T Q, strips of keys; in a mixed tile from the first to the last query
  // that sees any of them.
  const auto add_transposed = [&](const float* tile_values, const float* rows, int64_t stride, float* out) {
    GemmArgs g = {};
    g.a = tile_values;
    g.a_stride = kTileColumns;
    g.b = rows;
    g.b_stride = stride;
    g.b_panel_stride = isa_.panel_width;
    g.c = out;
    g.c_stride = stride;
    g.num_rows = tile.num_kv;
    g.num_vectors = static_cast<int>(stride) / isa_.vector_width;
    g.depth = tile.num_q;
    if (!is_mixed) return isa_.gemm_columns(g);
    for (int key = 0; key < tile.num_kv; key += isa_.strip_rows) {
      g.num_rows = std::min(isa_.strip_rows, tile.num_kv - key);
      const uint64_t columns = ((uint64_t{1} << g.num_rows) - 1) << key;
      const auto sees = [&](int q) {
        const uint32_t* bits = worker.rows[q].bits;
        return ((bits[0] | uint64_t{bits[1]} << 32) & columns) != 0;
      };
      int first = 0, last = tile.num_q;
      while (first < last && !sees(first)) ++first;
      if (first == last) continue;
      while (!sees(last - 1)) --last;
      g.a = tile_values + first * kTileColumns + key;
      g.b = rows + first * stride;
      g.c = out + key * stride;
      g.depth = last - first;
      isa_.gemm_columns(g);
    }
  };
  if (needs_dvalue_) {
    add_transposed(worker.probs, worker.dout + tile.q_begin * value_stride_, value_stride_, tile.dvalues);
  }
  if (needs_dkey_) {
    add_transposed(worker.dprobs, worker.query + tile.q_begin * query_stride_, query_stride_, tile.dkeys);
  }
  if (needs_dquery_) {
    GemmArgs g = {};
    g.a = worker.dprobs;
    g.a_stride = kTileColumns;
    g.b = worker.keys;
    g.b_stride = query_stride_;
    g.b_panel_stride = isa_.panel_width;
    g.c = worker.dquery + tile.q_begin * query_stride_;
    g.c_stride = query_stride_;
    g.num_rows = tile.num_q;
    g.num_vectors = static_cast<int>(query_stride_) / isa_.vector_width;
    KeySumProduct(isa_, isa_.gemm_rows[kGemmAdd], g, is_mixed ? worker.strips : nullptr, tile.num_kv, 1);
  }
}

// The same where Q, dO or K holds NaN or infinity: a dead element's 0 must not meet it.
void BackwardCall::AccumulateSkippingDead(Worker& worker, const Tile& tile) {
  const auto add = [](float* dst, float factor, const float* src, int64_t count) {
    for (int64_t c = 0; c < count; ++c) dst[c] += factor * src[c];
  };
  for (int row = 0; row < tile.num_q; ++row) {
    const TileRow& live = worker.rows[row];
    const int64_t q = tile.q_begin + row;
    for (int key = live.begin; key < live.end; ++key) {
      if (!(live.bits[key / 32] >> (key % 32) & 1)) continue;
      const float prob = worker.probs[row * kTileColumns + key];
      const float dscore = worker.dprobs[row * kTileColumns + key];
      if (needs_dvalue_) {
        add(tile.dvalues + key * value_stride_, prob, worker.dout + q * value_stride_, value_stride_);
      }
      if (needs_dkey_) {
        add(tile.dkeys + key * query_stride_, dscore, worker.query + q * query_stride_, query_stride_);
      }
      if (needs_dquery_) {
        add(worker.dquery + q * query_stride_, dscore, worker.keys + key * query_stride_, query_stride_);
      }
    }
  }
}

// `dquery` is dS K, without the scale: dscale = sum of q . dquery holds for a scale of 0 too.
void BackwardCall::FinishHead(Worker& worker, const Task& task, int head, const float* dquery, double* dscale) {
  const int64_t query_row = int64_t{p_.num_q_heads} * p_.head_dim;
  const int64_t live_q = p_.QueryLength(task.outer);
  if (results_.dscale) {
    const float* lse = operands_.lse.At<float>(task.outer) + head * p_.q_seq_len;
    PackArgs pack = {};
    pack.dtype = p_.query.dtype;
    pack.src_stride = query_row;
    pack.num_columns = p_.head_dim;
    pack.scale = 1.0f;
    pack.out = worker.rows_buffer;
    pack.out_stride = query_stride_;
    for (int64_t q0 = 0; q0 < live_q; q0 += kPackRows) {
      pack.src = p_.query.Address(task.outer, q0 * query_row + int64_t{head} * p_.head_dim);
      pack.num_rows = pack.padded_rows = static_cast<int>(std::min<int64_t>(kPackRows, live_q - q0));
      isa_.pack_rows(pack);
      for (int64_t q = q0; q < q0 + pack.num_rows; ++q) {
        if (lse[q] == kNegInf) continue;
        *dscale += isa_.dot(worker.rows_buffer + (q - q0) * query_stride_, dquery + q * query_stride_,
                            static_cast<int>(query_stride_));
      }
    }
  }
  if (!results_.dquery || key_parts_ > 1) return;
  for (int64_t q = 0; q < p_.q_seq_len; ++q) {
    isa_.store_row(results_.dquery.Address(task.outer, q * query_row + int64_t{head} * p_.head_dim),
                   results_.dquery.dtype, dquery + q * query_stride_, p_.ScaleOf(task.outer), p_.head_dim);
  }
}

// The copy of Q holds the scale already, so dK needs none.
void BackwardCall::StoreKeys(int64_t outer, int kv_head, int64_t kv_begin, int num_kv, const float* dkeys,
                             const float* dvalues) {
  for (int row = 0; row < num_kv; ++row) {
    const int64_t index = (kv_begin + row) * p_.num_kv_heads + kv_head;
    if (needs_dkey_) {
      isa_.store_row(results_.dkey.Address(outer, index * p_.head_dim), results_.dkey.dtype,
                     dkeys + row * query_stride_, 1.0f, p_.head_dim);
    }
    if (needs_dvalue_) {
      isa_.store_row(results_.dvalue.Address(outer, index * p_.value_head_dim), results_.dvalue.dtype,
                     dvalues + row * value_stride_, 1.0f, p_.value_head_dim);
    }
  }
}

void BackwardCall::ReduceQueries() {
  if (!results_.dquery) return;
  const int64_t query_row = int64_t{p_.num_q_heads} * p_.head_dim;
  const int64_t per_head = num_q_tiles_;
  ParallelFor(executor_, p_.num_outer() * p_.num_q_heads * per_head, [&](int64_t task, int) {
    const int64_t tile = task % per_head, outer = task / per_head / p_.num_q_heads;
    const int head = static_cast<int>(task / per_head % p_.num_q_heads);
    const int64_t begin = tile * kTileRows, end = std::min<int64_t>(begin + kTileRows, p_.q_seq_len);
    float* sum = PartialQueries(0, outer, head) + begin * query_stride_;
    for (int part = 1; part < key_parts_; ++part) {
      isa_.add_row(sum, PartialQueries(part, outer, head) + begin * query_stride_,
                   static_cast<int>((end - begin) * query_stride_));
    }
    for (int64_t q = begin; q < end; ++q) {
      isa_.store_row(results_.dquery.Address(outer, q * query_row + int64_t{head} * p_.head_dim), results_.dquery.dtype,
                     sum + (q - begin) * query_stride_, p_.ScaleOf(outer), p_.head_dim);
    }
  });
}

void BackwardCall::ReduceKeys() {
  ParallelFor(executor_, p_.num_outer() * p_.num_kv_heads * num_kv_tiles_, [&](int64_t task, int) {
    const int64_t kv_begin = task % num_kv_tiles_ * kTileColumns;
    const int64_t outer = task / num_kv_tiles_ / p_.num_kv_heads;
    const int kv_head = static_cast<int>(task / num_kv_tiles_ % p_.num_kv_heads);
    const auto dkeys = [&](int part) { return PartialKeys(part, outer, kv_head) + kv_begin * query_stride_; };
    const auto dvalues = [&](int part) {
      return PartialKeys(part, outer, kv_head) + kv_padded_ * query_stride_ + kv_begin * value_stride_;
    };
    for (int part = 1; part < group_parts_; ++part) {
      isa_.add_row(dkeys(0), dkeys(part), static_cast<int>(kTileColumns * query_stride_));
      isa_.add_row(dvalues(0), dvalues(part), static_cast<int>(kTileColumns * value_stride_));
    }
    StoreKeys(outer, kv_head, kv_begin, static_cast<int>(std::min<int64_t>(kTileColumns, p_.kv_seq_len - kv_begin)),
              dkeys(0), dvalues(0));
  });
}

// The sums over tasks, in the order of the tasks.
void BackwardCall::ReduceOthers() {
  FlushDenormals flush;
  if (results_.dscale) {
    std::vector<double> sums(static_cast<size_t>(p_.num_vmap), 0.0);
    for (int64_t task = 0; task < num_tasks_; ++task) {
      sums[static_cast<size_t>(p_.VmapOf(TaskOf(task).outer))] += workspace_.At<double>(at_.dscale)[task];
    }
    for (size_t i = 0; i < sums.size(); ++i) static_cast<float*>(results_.dscale.data)[i] = static_cast<float>(sums[i]);
  }
  constexpr int64_t kChunk = int64_t{1} << 20;  // add_row counts in int
  const auto add = [&](float* dst, const float* src, int64_t count) {
    for (int64_t begin = 0; begin < count; begin += kChunk) {
      isa_.add_row(dst + begin, src + begin, static_cast<int>(std::min(kChunk, count - begin)));
    }
  };
  for (int64_t task = 0; task < num_tasks_; ++task) {
    const int64_t outer = TaskOf(task).outer;
    if (bias_sharing_ == Sharing::kPrivate) {
      add(static_cast<float*>(results_.dbias.Address(outer, 0)),
          workspace_.At<float>(at_.private_bias) + task * bias_size_, bias_size_);
    }
    if (capture_sharing_ == Sharing::kPrivate) {
      const float* captures = workspace_.At<float>(at_.private_captures) + task * captures_size_;
      for (size_t i = 0; i < capture_sizes_.size(); captures += capture_sizes_[i], ++i) {
        if (capture_sizes_[i] == 0) continue;
        add(static_cast<float*>(results_.dcaptures[i].Address(outer, 0)), captures, capture_sizes_[i]);
      }
    }
  }
}

}  // namespace

void AttentionBackward(const AttentionProblem& problem, const BackwardOperands& operands,
                       const BackwardResults& results, const Executor& executor) {
  if (problem.num_vmap == 0) return;
  BackwardCall(problem, operands, results, executor).Run();
}

}  // namespace fkl
