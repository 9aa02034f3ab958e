#include "ffi_decode.h"

namespace fkl {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kAbi = 1;

DType DTypeOf(ffi::DataType type, std::string_view role) {
  switch (type) {
    case ffi::F32: return DType::kF32;
    case ffi::BF16: return DType::kBF16;
    case ffi::F16: return DType::kF16;
    case ffi::F64: return DType::kF64;
    case ffi::PRED: return DType::kBool;
    case ffi::S8: return DType::kS8;
    case ffi::U8: return DType::kU8;
    case ffi::S16: return DType::kS16;
    case ffi::U16: return DType::kU16;
    case ffi::S32: return DType::kS32;
    case ffi::U32: return DType::kU32;
    case ffi::S64: return DType::kS64;
    default: throw InvalidCall(std::string(role) + " has an element type that the kernels do not read");
  }
}

void Add(Arrays* arrays, std::string_view role, const ffi::AnyBuffer& buffer) {
  const auto dims = buffer.dimensions();
  Array array = {buffer.untyped_data(), DTypeOf(buffer.element_type(), role), Dims(dims.begin(), dims.end())};
  if (!arrays->emplace(role, std::move(array)).second) throw InvalidCall(std::string(role) + " is given twice");
}

}  // namespace

AttentionCall DecodeCall(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                         const ffi::Dictionary& attributes) {
  const auto abi = Attribute<int64_t>(attributes, "abi");
  if (abi != kAbi) {
    throw InvalidCall("the program was made for version " + std::to_string(abi) +
                      " of the custom call, this library has version " + std::to_string(kAbi) +
                      "; trace or export it again with this version of fkl_jax");
  }
  const auto nothing = [](std::string_view, size_t) {};
  const auto operand_roles = Attribute<std::string_view>(attributes, "operands");
  CheckSame("the number of operands", static_cast<int64_t>(args.size()), "the number of their roles",
            static_cast<int64_t>(ForEachRole(operand_roles, nothing)));
  Arrays operands, results;
  ForEachRole(operand_roles, [&](std::string_view role, size_t index) {
    auto buffer = args.get<ffi::AnyBuffer>(index);
    if (buffer.has_error()) throw InvalidCall("operand " + std::string(role) + " cannot be decoded");
    Add(&operands, role, buffer.value());
  });
  const auto result_roles = Attribute<std::string_view>(attributes, "results");
  CheckSame("the number of results", static_cast<int64_t>(rets.size()), "the number of their roles",
            static_cast<int64_t>(ForEachRole(result_roles, nothing)));
  ForEachRole(result_roles, [&](std::string_view role, size_t index) {
    auto buffer = rets.get<ffi::AnyBuffer>(index);
    if (buffer.has_error()) throw InvalidCall("result " + std::string(role) + " cannot be decoded");
    Add(&results, role, *buffer.value());
  });
  const BlockSizes blocks = {.q = Attribute<int64_t>(attributes, "block_q"),
                             .kv = Attribute<int64_t>(attributes, "block_kv")};
  return AttentionCall(Attribute<int64_t>(attributes, "num_batch_dims"), blocks, std::move(operands),
                       std::move(results));
}

}  // namespace fkl
