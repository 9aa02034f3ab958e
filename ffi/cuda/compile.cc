#include "cuda/compile.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <filesystem>
#include <mutex>

#include "cuda/driver.h"
#include "cuda/files.h"
#include "cuda/settings.h"
#include "cuda/sha256.h"
#include "device/attention/params.cuh"

namespace fkl::cuda {
namespace {

constexpr size_t kNumErrorsShown = 3;

std::vector<std::string_view> Lines(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    lines.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

bool Contains(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

// The number before `what`, for example 16 in "16 bytes spill stores", or 0.
int NumberBefore(std::string_view line, std::string_view what) {
  size_t end = line.find(what);
  if (end == std::string_view::npos) return 0;
  while (end > 0 && line[end - 1] == ' ') --end;
  size_t begin = end;
  while (begin > 0 && line[begin - 1] >= '0' && line[begin - 1] <= '9') --begin;
  int number = 0;
  std::from_chars(line.data() + begin, line.data() + end, number);
  return number;
}

std::string_view Quoted(std::string_view line) {
  const size_t begin = line.find('\'');
  if (begin == std::string_view::npos) return {};
  const size_t end = line.find('\'', begin + 1);
  return line.substr(begin + 1, end == std::string_view::npos ? end : end - begin - 1);
}

Headers ReadHeaders(const std::string& dir) {
  namespace fs = std::filesystem;
  Headers headers;
  headers.dir = dir;
  std::error_code error;
  for (fs::recursive_directory_iterator entry(dir, error), end; !error && entry != end; entry.increment(error)) {
    if (entry->path().extension() != ".cuh") continue;
    std::optional<std::string> text = ReadFile(entry->path().string());
    if (!text) throw CudaError("the device header " + entry->path().string() + " cannot be read");
    headers.files.emplace_back(entry->path().lexically_relative(dir).generic_string(), std::move(*text));
  }
  if (headers.files.empty()) {
    throw CudaError("there are no device headers in '" + dir + "'; reinstall fkl_jax");
  }
  std::sort(headers.files.begin(), headers.files.end());
  Sha256 digest;
  for (const auto& [name, text] : headers.files) digest.AddField(name).AddField(text);
  headers.digest = digest.Finish();
  return headers;
}

// The errors at the start of a log, each with the line that points at it.
std::string FirstErrors(std::string_view log) {
  std::string text;
  size_t num_errors = 0;
  for (const std::string_view line : Lines(log)) {
    if (!Contains(line, "error")) continue;
    text += "\n  " + std::string(line);
    if (++num_errors == kNumErrorsShown) break;
  }
  return text.empty() ? "\n" + std::string(log.substr(0, 2000)) : text;
}

class ScopedProgram {
 public:
  ScopedProgram(const Nvrtc& nvrtc, const std::string& glue, const Headers& headers) : nvrtc_(nvrtc) {
    std::vector<const char*> names, texts;
    for (const auto& [name, text] : headers.files) {
      names.push_back(name.c_str());
      texts.push_back(text.c_str());
    }
    nvrtc.Check(nvrtc.nvrtcCreateProgram(&program_, glue.c_str(), "glue.cu", static_cast<int>(names.size()),
                                         texts.data(), names.data()),
                "nvrtcCreateProgram");
  }
  ~ScopedProgram() { nvrtc_.nvrtcDestroyProgram(&program_); }
  ScopedProgram(const ScopedProgram&) = delete;
  ScopedProgram& operator=(const ScopedProgram&) = delete;

  Result CompileWith(const std::vector<std::string>& options) {
    std::vector<const char*> arguments;
    for (const std::string& option : options) arguments.push_back(option.c_str());
    return nvrtc_.nvrtcCompileProgram(program_, static_cast<int>(arguments.size()), arguments.data());
  }
  std::string Log() const {
    size_t size = 0;
    nvrtc_.Check(nvrtc_.nvrtcGetProgramLogSize(program_, &size), "nvrtcGetProgramLogSize");
    std::string log(size, '\0');
    nvrtc_.Check(nvrtc_.nvrtcGetProgramLog(program_, log.data()), "nvrtcGetProgramLog");
    log.resize(std::min(log.size(), log.find('\0')));
    return log;
  }
  std::string Cubin() const {
    size_t size = 0;
    nvrtc_.Check(nvrtc_.nvrtcGetCUBINSize(program_, &size), "nvrtcGetCUBINSize");
    std::string cubin(size, '\0');
    nvrtc_.Check(nvrtc_.nvrtcGetCUBIN(program_, cubin.data()), "nvrtcGetCUBIN");
    return cubin;
  }

 private:
  const Nvrtc& nvrtc_;
  Program program_ = nullptr;
};

// Where the source was kept, or how to keep it.
std::string Dump(const std::string& glue, std::string_view arch, bool aligned, const std::string& log,
                 const std::string& cubin) {
  const std::string dir = GetSettings().dump_dir;
  if (dir.empty()) return "set FKL_JAX_DUMP_DIR to a folder to keep the source";
  const std::string stem =
      dir + "/" + Sha256().Add(glue).Finish().substr(0, 12) + "_" + std::string(arch) + (aligned ? "" : "_unaligned");
  std::string failure = ReplaceFile(stem + ".cu", glue);
  if (failure.empty()) failure = ReplaceFile(stem + ".log", log);
  if (failure.empty() && !cubin.empty()) failure = ReplaceFile(stem + ".cubin", cubin);
  return failure.empty() ? "the source is " + stem + ".cu" : "the source could not be kept: " + failure;
}

}  // namespace

LogFacts ParseLog(std::string_view log) {
  LogFacts facts;
  for (const std::string_view line : Lines(log)) {
    if (Contains(line, "Compiling entry function")) {
      facts.kernels.push_back({.name = std::string(Quoted(line))});
    } else if (Contains(line, "bytes stack frame") && !facts.kernels.empty()) {
      facts.kernels.back().stack_bytes = NumberBefore(line, "bytes stack frame");
      facts.kernels.back().spill_bytes =
          NumberBefore(line, "bytes spill stores") + NumberBefore(line, "bytes spill loads");
    } else if (Contains(line, "ptxas") && Contains(line, " registers") && !facts.kernels.empty()) {
      facts.kernels.back().registers = NumberBefore(line, "registers");
    }
    // "(C7510) Potential Performance Loss" comes as an info line.
    if (Contains(line, "warning") || Contains(line, "(C75")) facts.warnings.emplace_back(line);
  }
  return facts;
}

std::shared_ptr<const Headers> DeviceHeaders() {
  struct Global {
    std::mutex mutex;
    std::shared_ptr<const Headers> headers;
  };
  static Global* global = new Global;
  const std::string dir = GetSettings().device_dir;
  const std::lock_guard lock(global->mutex);
  if (global->headers == nullptr || global->headers->dir != dir) {
    global->headers = std::make_shared<const Headers>(ReadHeaders(dir));
  }
  return global->headers;
}

std::string ArchName(int arch) {
  const Nvrtc& nvrtc = GetNvrtc();
  int best = 0;
  for (const int known : nvrtc.archs) {
    if (known / 10 == arch / 10 && known <= arch) best = known;
  }
  if (best == 0) {
    throw CudaError("NVRTC " + std::to_string(nvrtc.major) + "." + std::to_string(nvrtc.minor) +
                    " cannot compile for compute capability " + std::to_string(arch / 10) + "." +
                    std::to_string(arch % 10) + "; install a newer one (" + nvrtc.path + ")");
  }
  return "sm_" + std::to_string(best) + (best == arch && arch >= 90 ? "a" : "");
}

std::vector<std::string> CompileOptions(std::string_view arch, bool aligned) {
  return {"--gpu-architecture=" + std::string(arch),
          "--std=c++17",
          "-default-device",
          "--ptxas-options=-v",
          "-DFKL_ALIGNED=" + std::to_string(static_cast<int>(aligned)),
          "-DFKL_FORWARD_PARAMS_BYTES=" + std::to_string(sizeof(ForwardParams)),
          "-DFKL_BACKWARD_PARAMS_BYTES=" + std::to_string(sizeof(BackwardParams))};
}

Compiled Compile(const std::string& glue, const std::string& arch, bool aligned, std::string_view origin) {
  const Nvrtc& nvrtc = GetNvrtc();
  const std::shared_ptr<const Headers> headers = DeviceHeaders();
  const auto start = std::chrono::steady_clock::now();
  ScopedProgram program(nvrtc, glue, *headers);
  const Result result = program.CompileWith(CompileOptions(arch, aligned));
  Compiled compiled;
  compiled.log = program.Log();
  if (result != 0) {
    throw CudaError("NVRTC could not compile the kernels of this call for " + arch + " (" +
                    nvrtc.nvrtcGetErrorString(result) + "):" + FirstErrors(compiled.log) + "\n" +
                    Dump(glue, arch, aligned, compiled.log, "") +
                    (origin.empty() ? "" : "\nThe call was:\n" + std::string(origin)));
  }
  compiled.cubin = program.Cubin();
  compiled.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (!GetSettings().dump_dir.empty()) Dump(glue, arch, aligned, compiled.log, compiled.cubin);
  return compiled;
}

}  // namespace fkl::cuda
