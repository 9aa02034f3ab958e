// The Python module fkl_jax._ext: the custom calls and what tests ask the library about itself.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "attention_handlers.h"
#include "cpu/attention_cpu.h"
#include "cpu/isa_select.h"
#include "cpu/program_ops.h"
#include "cuda/cuda_bindings.h"

namespace nb = nanobind;

namespace {

nb::capsule CapsuleOf(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

std::vector<std::string> CpuIsas() {
  std::vector<std::string> names;
  for (const fkl::IsaKernels* kernels : fkl::SupportedIsas()) names.push_back(kernels->name);
  return names;
}

std::vector<std::string> ProgramOps() {
  return {
#define FKL_X(identifier, name) name,
      FKL_PROGRAM_OPS(FKL_X)
#undef FKL_X
  };
}

nb::dict TakeTileCounts() {
  fkl::TileCounts& counts = fkl::GlobalTileCounts();
  nb::dict taken;
  taken["full"] = counts.full.exchange(0);
  taken["mixed"] = counts.mixed.exchange(0);
  taken["dead"] = counts.dead.exchange(0);
  return taken;
}

}  // namespace

NB_MODULE(_ext, m) {
  fkl::SelectIsa();  // reads the environment now, not on the way of a call
  m.attr("ffi_api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.def(
      "handlers",
      [] {
        nb::dict cpu, platforms;
        cpu["fkl_attention_fwd"] = CapsuleOf(fkl::AttentionForwardCpu);
        cpu["fkl_attention_bwd"] = CapsuleOf(fkl::AttentionBackwardCpu);
        platforms["cpu"] = cpu;
        platforms["CUDA"] = fkl::cuda::Handlers();
        return platforms;
      },
      "Handlers of the custom calls by platform and name.");
  m.def("program_ops", &ProgramOps, "Names of the bytecode's operations, in the order of their numbers.");
  m.def("cpu_isas", &CpuIsas, "Instruction sets that this CPU supports, widest last.");
  m.def(
      "cpu_isa",
      [] {
        const fkl::IsaChoice& choice = fkl::SelectIsa();
        if (choice.kernels == nullptr) throw nb::value_error(choice.error.c_str());
        return std::string(choice.kernels->name);
      },
      "The instruction set in use; ValueError if FKL_JAX_CPU_ISA names one that this CPU lacks.");
  m.def("tile_counts", &TakeTileCounts,
        "Tiles of scores classified since the last call: full, mixed (looked at element by element) and dead.");
  fkl::cuda::Bind(m);
}
