#include "cuda/cuda_bindings.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "attention_call.h"
#include "cuda/attention_cuda.h"
#include "cuda/cache.h"
#include "cuda/compile.h"
#include "cuda/cuda_launch.h"
#include "cuda/driver.h"
#include "cuda/launch_call.h"
#include "cuda/loaded_kernels.h"
#include "cuda/settings.h"
#include "cuda/sha256.h"
#include "ffi_checks.h"

namespace nb = nanobind;

namespace fkl::cuda {
namespace {

nb::capsule CapsuleOf(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

nb::dict StagesOf(XLA_FFI_Error* (*initialize)(XLA_FFI_CallFrame*), XLA_FFI_Error* (*execute)(XLA_FFI_CallFrame*)) {
  nb::dict stages;
  stages["initialize"] = CapsuleOf(initialize);
  stages["execute"] = CapsuleOf(execute);
  return stages;
}

nb::dict CompileForPython(const std::string& glue, const std::string& arch, bool aligned) {
  Compiled compiled;
  {
    const nb::gil_scoped_release released;
    compiled = Compile(glue, arch, aligned, "");
  }
  const LogFacts facts = ParseLog(compiled.log);
  nb::dict registers, spills, result;
  int spill_bytes = 0;
  for (const KernelUse& kernel : facts.kernels) {
    registers[kernel.name.c_str()] = kernel.registers;
    spills[kernel.name.c_str()] = kernel.spill_bytes;
    spill_bytes += kernel.spill_bytes;
  }
  result["cubin"] = nb::bytes(compiled.cubin.data(), compiled.cubin.size());
  result["log"] = compiled.log;
  result["seconds"] = compiled.seconds;
  result["spill_bytes"] = spill_bytes;
  result["spills"] = spills;
  result["registers"] = registers;
  result["warnings"] = facts.warnings;
  return result;
}

nb::bytes CubinForPython(const std::string& glue, const std::string& arch, bool aligned) {
  std::string cubin;
  {
    const nb::gil_scoped_release released;
    cubin = GetCubin(glue, arch, aligned, "");
  }
  return nb::bytes(cubin.data(), cubin.size());
}

nb::list DevicesForPython() {
  nb::list devices;
  for (int index = 0, count = NumDevices(); index < count; ++index) {
    const DeviceInfo& info = GetDeviceInfo(index);
    nb::dict device;
    device["name"] = info.name;
    device["arch"] = info.arch;
    device["max_shared_bytes"] = info.max_shared_bytes;
    device["num_multiprocessors"] = info.num_multiprocessors;
    devices.append(device);
  }
  return devices;
}

nb::dict CountsForPython() {
  const CacheCounts counts = GetCacheCounts();
  nb::dict result;
  result["compiled"] = counts.compiled;
  result["disk_hits"] = counts.disk_hits;
  result["broken_entries"] = counts.broken_entries;
  result["failed_writes"] = counts.failed_writes;
  result["evicted"] = counts.evicted;
  result["loaded"] = NumLoadedKernels();
  return result;
}

// ---- parameters, for tests: addresses are numbers that nobody follows

DType DTypeNamed(const std::string& name) {
  for (int i = 0; i <= static_cast<int>(DType::kS64); ++i) {
    if (name == NameOf(static_cast<DType>(i))) return static_cast<DType>(i);
  }
  throw nb::value_error(("no dtype " + name).c_str());
}

using PythonArrays = std::map<std::string, std::tuple<uint64_t, std::string, std::vector<int64_t>>>;

Arrays ArraysOf(const PythonArrays& given) {
  Arrays arrays;
  for (const auto& [role, array] : given) {
    const auto& [address, dtype, dims] = array;
    arrays.emplace(role, Array{reinterpret_cast<void*>(address), DTypeNamed(dtype), dims});
  }
  return arrays;
}

template <class T>
uint64_t Number(T* address) {
  return reinterpret_cast<uint64_t>(address);
}

nb::list List(const long long (&values)[kMaxOuterAxes]) {
  nb::list list;
  for (const long long value : values) list.append(value);
  return list;
}

nb::dict Show(const VectorParam& param) {
  nb::dict shown;
  shown["data"] = Number(param.data);
  shown["outer_stride"] = List(param.outer_stride);
  return shown;
}

nb::dict Show(const TensorParam& param) {
  nb::dict shown;
  shown["data"] = Number(param.data);
  shown["outer_stride"] = List(param.outer_stride);
  shown["head_stride"] = param.head_stride;
  shown["row_stride"] = param.row_stride;
  return shown;
}

nb::list Show(const VectorParam (&params)[kMaxCaptures]) {
  nb::list shown;
  for (const VectorParam& param : params) shown.append(Show(param));
  return shown;
}

nb::list Show(const TensorMaps& maps) {
  nb::list shown;
  for (const auto& strides : maps.outer_stride) {
    nb::list list;
    for (const int stride : strides) list.append(stride);
    shown.append(list);
  }
  return shown;
}

// Address, sizes and box of what is encoded in this round.
nb::list Show(const std::vector<MapSource>& maps) {
  nb::list shown;
  for (const MapSource& map : maps) {
    nb::list dims, box;
    for (int axis = 0; axis < 4; ++axis) {
      dims.append(axis == 3 ? map.num_outer() : map.dims[axis]);
      box.append(map.box[axis]);
    }
    shown.append(nb::make_tuple(Number(*map.data), dims, box));
  }
  return shown;
}

nb::list Show(const std::vector<Memory>& parts) {
  nb::list shown;
  for (const Memory& part : parts) shown.append(nb::make_tuple(Number(part.data), part.bytes));
  return shown;
}

#define FKL_SHOW(field) shown[#field] = Show(p.field)
#define FKL_NUMBER(field) shown[#field] = p.field
#define FKL_ADDRESS(field) shown[#field] = Number(p.field)

nb::dict Show(const CommonParams& p) {
  nb::dict shown;
  nb::list outer_size;
  for (int axis = 0; axis < p.num_outer_axes; ++axis) outer_size.append(p.outer_size[axis]);
  shown["outer_size"] = outer_size;
  FKL_NUMBER(num_outer);
  FKL_NUMBER(q_seq_len);
  FKL_NUMBER(kv_seq_len);
  FKL_NUMBER(num_q_heads);
  FKL_NUMBER(num_kv_heads);
  FKL_NUMBER(head_dim);
  FKL_NUMBER(value_head_dim);
  FKL_SHOW(query);
  FKL_SHOW(key);
  FKL_SHOW(value);
  FKL_SHOW(scale);
  FKL_SHOW(bias);
  FKL_NUMBER(bias_column_stride);
  FKL_SHOW(q_segment_ids);
  FKL_SHOW(kv_segment_ids);
  FKL_SHOW(q_seq_lengths);
  FKL_SHOW(kv_seq_lengths);
  FKL_SHOW(q_offset);
  FKL_SHOW(kv_offset);
  FKL_SHOW(sinks);
  FKL_SHOW(block_mask);
  FKL_NUMBER(block_q);
  FKL_NUMBER(block_kv);
  FKL_NUMBER(num_q_blocks);
  FKL_NUMBER(num_kv_blocks);
  FKL_SHOW(batch_index);
  FKL_SHOW(head_index);
  FKL_SHOW(captures);
  return shown;
}

nb::dict Show(const ForwardParams& p) {
  nb::dict shown = Show(p.common);
  FKL_SHOW(out);
  FKL_ADDRESS(lse);
  FKL_NUMBER(num_splits);
  FKL_ADDRESS(partial_out);
  FKL_ADDRESS(partial_lse);
  FKL_ADDRESS(scratch);
  return shown;
}

nb::dict Show(const BackwardParams& p) {
  nb::dict shown = Show(p.common);
  FKL_SHOW(out);
  FKL_SHOW(dout);
  FKL_SHOW(lse);
  FKL_SHOW(dlse);
  FKL_SHOW(dquery);
  FKL_SHOW(dkey);
  FKL_SHOW(dvalue);
  FKL_ADDRESS(dquery_accumulator);
  FKL_ADDRESS(delta);
  FKL_ADDRESS(lse_log2);
  FKL_NUMBER(padded_q_rows);
  FKL_ADDRESS(dscale);
  FKL_SHOW(dscale_result);
  FKL_SHOW(dbias);
  FKL_NUMBER(dbias_column_stride);
  FKL_SHOW(dcaptures);
  FKL_ADDRESS(scratch);
  return shown;
}

#undef FKL_SHOW
#undef FKL_NUMBER
#undef FKL_ADDRESS

nb::dict ParamsForPython(bool is_backward, int64_t num_batch_dims, int64_t block_q, int64_t block_kv,
                         const PythonArrays& operands, const PythonArrays& results,
                         const std::vector<int32_t>& launch) {
  const AttentionCall call(num_batch_dims, {.q = block_q, .kv = block_kv}, ArraysOf(operands), ArraysOf(results));
  const LaunchRecords records = DecodeLaunch(launch);
  PreparedCall prepared(is_backward ? Direction::kBackward : Direction::kForward, call, records);
  nb::dict shown;
  nb::list grids, rounds;
  for (const Grid& grid : prepared.grids()) {
    grids.append(nb::make_tuple(grid.blocks, grid.threads, grid.shared_bytes));
  }
  shown["has_kernels"] = prepared.has_kernels();
  shown["is_aligned"] = prepared.is_aligned();
  shown["grids"] = grids;
  shown["zeroed_once"] = Show(prepared.zeroed_once());
  shown["zeroed"] = Show(prepared.zeroed());
  for (int64_t round = 0; prepared.has_kernels() && round < prepared.num_rounds(); ++round) {
    prepared.SetRound(round);
    nb::dict params = is_backward ? Show(prepared.backward()) : Show(prepared.forward());
    const TensorMaps& maps = is_backward ? prepared.backward().maps : prepared.forward().maps;
    params["maps"] = Show(prepared.maps());
    params["map_outer_stride"] = Show(maps);
    rounds.append(params);
  }
  shown["rounds"] = rounds;
  return shown;
}

// Launches without XLA, on the first device and its default stream: the addresses must be the device's.
void LaunchForPython(bool is_backward, int64_t num_batch_dims, int64_t block_q, int64_t block_kv,
                     const PythonArrays& operands, const PythonArrays& results, const std::vector<int32_t>& launch,
                     const std::string& glue, const std::string& kernels) {
  const nb::gil_scoped_release released;
  const AttentionCall call(num_batch_dims, {.q = block_q, .kv = block_kv}, ArraysOf(operands), ArraysOf(results));
  const CallCode code(glue, kernels, "", launch);
  PreparedCall prepared(is_backward ? Direction::kBackward : Direction::kForward, call, code.records());
  LaunchCall(code, &prepared, 0, nullptr);
}

// What decoding and filling cost, less what XLA's own buffers cost: microseconds per call.
double ParamsMicroseconds(bool is_backward, int64_t num_batch_dims, int64_t block_q, int64_t block_kv,
                          const PythonArrays& operands, const PythonArrays& results, const std::vector<int32_t>& launch,
                          int repeats) {
  const Arrays given = ArraysOf(operands), asked = ArraysOf(results);
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < repeats; ++i) {
    const AttentionCall call(num_batch_dims, {.q = block_q, .kv = block_kv}, given, asked);
    const LaunchRecords records = DecodeLaunch(launch);
    PreparedCall(is_backward ? Direction::kBackward : Direction::kForward, call, records).SetRound(0);
  }
  const std::chrono::duration<double, std::micro> passed = std::chrono::steady_clock::now() - start;
  return passed.count() / repeats;
}

}  // namespace

nb::dict Handlers() {
  nb::dict handlers;
  handlers["fkl_attention_fwd"] = StagesOf(InitializeAttentionCuda, AttentionForwardCuda);
  handlers["fkl_attention_bwd"] = StagesOf(InitializeAttentionCuda, AttentionBackwardCuda);
  return handlers;
}

void Bind(nb::module_& m) {
  m.def(
      "set_cuda_settings",
      [](std::string device_dir, std::string nvrtc, std::vector<std::string> library_dirs, std::string cache_dir,
         std::string dump_dir, int64_t cache_bytes) {
        SetSettings({.device_dir = std::move(device_dir),
                     .nvrtc = std::move(nvrtc),
                     .library_dirs = std::move(library_dirs),
                     .cache_dir = std::move(cache_dir),
                     .dump_dir = std::move(dump_dir),
                     .cache_bytes = cache_bytes});
      },
      nb::arg("device_dir"), nb::arg("nvrtc"), nb::arg("library_dirs"), nb::arg("cache_dir"), nb::arg("dump_dir"),
      nb::arg("cache_bytes") = 0,
      "Where device headers, NVRTC, compiled kernels and kept sources are, and what the kernels may take on disk (0: "
      "any); "
      "read when first needed.");
  m.def("compile_cuda", &CompileForPython, nb::arg("glue"), nb::arg("arch"), nb::arg("aligned") = true,
        "Compile a glue text for an architecture like 'sm_80': cubin, log, seconds, registers and "
        "spills by kernel, "
        "spill_bytes in all, warnings.");
  m.def("cached_cubin", &CubinForPython, nb::arg("glue"), nb::arg("arch"), nb::arg("aligned") = true,
        "The same through the disk cache: the cubin.");
  m.def(
      "cuda_cache_key",
      [](const std::string& glue, const std::string& arch, bool aligned) { return CacheKey(glue, arch, aligned); },
      nb::arg("glue"), nb::arg("arch"), nb::arg("aligned") = true, "Name of the entry in the disk cache.");
  m.def("cuda_arch_name", &ArchName, nb::arg("arch"), "The architecture to compile for on a GPU: 'sm_90a' for 90.");
  m.def("cuda_devices", &DevicesForPython, "GPUs of this machine; RuntimeError if there is no driver.");
  m.def("cuda_driver_version", [] { return GetDriver().version; }, "CUDA version of the driver, 12040 for 12.4.");
  m.def(
      "nvrtc_version",
      [] {
        const Nvrtc& nvrtc = GetNvrtc();
        return nb::make_tuple(nvrtc.major, nvrtc.minor, nvrtc.path);
      },
      "Version and path of the NVRTC in use; RuntimeError if there is none.");
  m.def("cuda_counts", &CountsForPython, "What the kernel cache did since the process started.");
  m.def("cuda_params", &ParamsForPython, nb::arg("is_backward"), nb::arg("num_batch_dims"), nb::arg("block_q"),
        nb::arg("block_kv"), nb::arg("operands"), nb::arg("results"), nb::arg("launch"),
        "What would be launched for arrays given as role: (address, dtype, shape).");
  m.def("cuda_launch", &LaunchForPython, nb::arg("is_backward"), nb::arg("num_batch_dims"), nb::arg("block_q"),
        nb::arg("block_kv"), nb::arg("operands"), nb::arg("results"), nb::arg("launch"), nb::arg("glue"),
        nb::arg("kernels"), "Launch such a call on the first device, without JAX.");
  m.def("cuda_params_microseconds", &ParamsMicroseconds, nb::arg("is_backward"), nb::arg("num_batch_dims"),
        nb::arg("block_q"), nb::arg("block_kv"), nb::arg("operands"), nb::arg("results"), nb::arg("launch"),
        nb::arg("repeats"), "Time that filling the parameters of such a call takes.");
  m.def(
      "sha256", [](const nb::bytes& bytes) { return Sha256().Add({bytes.c_str(), bytes.size()}).Finish(); },
      "Of the cache, for its test.");
}

}  // namespace fkl::cuda
