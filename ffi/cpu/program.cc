#include "cpu/program.h"

#include <iterator>
#include <string>
#include <vector>

namespace fkl {
namespace {

constexpr int kFormatVersion = 1;
constexpr int kHeaderSize = 7;
constexpr int kRecordSize = 8;

const char* OpName(int op) {
  static constexpr const char* kNames[] = {
#define FKL_X(identifier, name) name,
      FKL_PROGRAM_OPS(FKL_X)
#undef FKL_X
  };
  return kNames[op];
}

// Types of an operation's result and operands; kNone where there is no operand. const, input, load
// and select are checked apart.
enum : int { kNone = -1 };
struct Signature {
  int result;
  int operands[3];
};

constexpr Signature kUnaryF = {kTypeF32, {kTypeF32, kNone, kNone}};
constexpr Signature kBinaryF = {kTypeF32, {kTypeF32, kTypeF32, kNone}};
constexpr Signature kCompareF = {kTypeBool, {kTypeF32, kTypeF32, kNone}};
constexpr Signature kUnaryI = {kTypeI32, {kTypeI32, kNone, kNone}};
constexpr Signature kBinaryI = {kTypeI32, {kTypeI32, kTypeI32, kNone}};
constexpr Signature kCompareI = {kTypeBool, {kTypeI32, kTypeI32, kNone}};

Signature SignatureOf(ProgramOp op) {
  switch (op) {
    case kAddF:
    case kSubF:
    case kMulF:
    case kDivF:
    case kRemF:
    case kMaxF:
    case kMinF:
    case kPowF:
    case kAtan2F: return kBinaryF;
    case kFmaF: return {kTypeF32, {kTypeF32, kTypeF32, kTypeF32}};
    case kNegF:
    case kAbsF:
    case kSignF:
    case kSqrtF:
    case kRsqrtF:
    case kExpF:
    case kExp2F:
    case kExpm1F:
    case kLogF:
    case kLog1pF:
    case kTanhF:
    case kSinF:
    case kCosF:
    case kTanF:
    case kErfF:
    case kFloorF:
    case kCeilF:
    case kRoundEvenF:
    case kRoundAwayF:
    case kRoundBf16:
    case kRoundF16: return kUnaryF;
    case kIsFiniteF: return {kTypeBool, {kTypeF32, kNone, kNone}};
    case kEqF:
    case kNeF:
    case kLtF:
    case kLeF: return kCompareF;
    case kAddI:
    case kSubI:
    case kMulI:
    case kDivI:
    case kRemI:
    case kMaxI:
    case kMinI:
    case kAndI:
    case kOrI:
    case kXorI:
    case kShlI:
    case kShrAI:
    case kShrLI: return kBinaryI;
    case kNegI:
    case kAbsI:
    case kSignI:
    case kNotI: return kUnaryI;
    case kEqI:
    case kNeI:
    case kLtI:
    case kLeI: return kCompareI;
    case kAndB:
    case kOrB:
    case kXorB: return {kTypeBool, {kTypeBool, kTypeBool, kNone}};
    case kNotB: return {kTypeBool, {kTypeBool, kNone, kNone}};
    case kI32ToF32:
    case kBitsI32ToF32: return {kTypeF32, {kTypeI32, kNone, kNone}};
    case kF32ToI32:
    case kBitsF32ToI32: return {kTypeI32, {kTypeF32, kNone, kNone}};
    case kBoolToF32: return {kTypeF32, {kTypeBool, kNone, kNone}};
    case kBoolToI32: return {kTypeI32, {kTypeBool, kNone, kNone}};
    case kConst:
    case kInput:
    case kLoad:
    case kSelect:
    case kNumProgramOps: break;
  }
  return {kNone, {kNone, kNone, kNone}};
}

ProgramType TypeOf(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kBF16:
    case DType::kF16:
    case DType::kF64: return kTypeF32;
    case DType::kBool: return kTypeBool;
    default: return kTypeI32;
  }
}

// Type of each input and the earliest stage at which it is known.
struct InputInfo {
  ProgramType type;
  ProgramStage stage;
};
constexpr InputInfo kInputs[] = {
    {kTypeF32, kStageVector},      // score
    {kTypeI32, kStageHead},        // b
    {kTypeI32, kStageHead},        // h
    {kTypeI32, kStageRow},         // q
    {kTypeI32, kStageVector},      // kv
    {kTypeF32, kStageDerivative},  // ct
};
constexpr int kNumInputs = int(std::size(kInputs));

bool IsComparisonI(int op) { return op == kEqI || op == kNeI || op == kLtI || op == kLeI; }

// Calls function(id) for every value that `value` reads.
template <class F>
void ForEachOperand(const Program::Value& value, const std::vector<int>& extra, int rank, F function) {
  if (value.op == kLoad) {
    for (int d = 0; d < rank; ++d) function(extra[value.b + d]);
    return;
  }
  const int operands[] = {value.a, value.b, value.c};
  for (int k = 0; k < value.num_operands; ++k) function(operands[k]);
}

// Translates stages 2 and 3 to instructions and fuses: a product into the sum that alone uses it,
// and kv with a scalar, so that ALiBi's slope * (q - kv) reads no index row.
class RowInstructionBuilder {
 public:
  RowInstructionBuilder(const std::vector<Program::Value>& values, const std::vector<int>& extra,
                        const Capture* captures)
      : values_(values), extra_(extra), captures_(captures), num_uses_(values.size()), position_(values.size(), -1) {}

  void CountUse(int id) { ++num_uses_[id]; }
  void CountUses() {
    for (const Program::Value& value : values_) {
      ForEachOperand(value, extra_, Rank(value), [&](int x) { ++num_uses_[x]; });
    }
    // kv needs a row only if someone reads it in another way than the fused ones.
    for (const Program::Value& value : values_) {
      ForEachOperand(value, extra_, Rank(value), [&](int x) {
        if (IsKv(x) && !ReadsKvDirectly(value)) needs_kv_row_ = true;
      });
    }
  }

  // `score_row` and `ct_row`: registers that hold the inputs.
  void Build(ProgramStage stage, int score_row, int ct_row, std::vector<RowInstruction>* out) {
    out->clear();
    for (int id = 0; id < int(values_.size()); ++id) {
      if (values_[id].stage == stage) Add(id, score_row, ct_row, out);
    }
    std::erase_if(*out, [](const RowInstruction& in) { return in.op == kFusedAway; });
  }

 private:
  static constexpr int kFusedAway = -1;

  int Rank(const Program::Value& value) const { return value.op == kLoad ? captures_[value.a].rank : 0; }
  bool IsKv(int id) const { return values_[id].op == kInput && values_[id].a == kInputKv; }
  bool IsScalar(int id) const { return values_[id].stage <= kStageRow; }
  RowOperand Operand(int id) const {
    return IsScalar(id) ? RowOperand{id, kScalar} : RowOperand{values_[id].reg, kRegister};
  }

  bool HasUnitStride(const Program::Value& value) const {
    const int rank = Rank(value);
    if ((value.imm & 1) == 0 || rank == 0 || IsScalar(extra_[value.b + rank - 1])) return false;
    for (int d = 0; d < rank - 1; ++d) {
      if (!IsScalar(extra_[value.b + d])) return false;
    }
    return true;
  }

  bool ReadsKvDirectly(const Program::Value& value) const {
    if (value.op == kLoad) return HasUnitStride(value);
    if (value.op == kI32ToF32) return true;
    return (IsComparisonI(value.op) || value.op == kAddI || value.op == kSubI) && IsKvWithScalar(value);
  }
  bool IsKvWithScalar(const Program::Value& value) const {
    return (IsKv(value.a) && IsScalar(value.b)) || (IsScalar(value.a) && IsKv(value.b));
  }
  // kv plus or minus a scalar; sets the form and the scalar's operand.
  bool IsKvAffine(const Program::Value& value, RowInstruction* in) const {
    if ((value.op != kAddI && value.op != kSubI) || !IsKvWithScalar(value)) return false;
    in->a = Operand(IsKv(value.a) ? value.b : value.a);
    in->kv_form = value.op == kAddI ? kAPlusKv : IsKv(value.a) ? kKvMinusA : kAMinusKv;
    return true;
  }

  void Add(int id, int score_row, int ct_row, std::vector<RowInstruction>* out) {
    const Program::Value& value = values_[id];
    RowInstruction in = {};
    in.op = value.op;
    in.type = value.type;
    in.dst = value.reg;
    switch (value.op) {
      case kInput:
        if (value.a == kInputKv) {
          if (!needs_kv_row_) return;
          in.a = {0, kKv};
        } else {
          const int row = value.a == kInputScore ? score_row : ct_row;
          if (row == value.reg) return;  // the caller's row takes the place of the register
          in.a = {row, kRegister};
        }
        break;
      case kLoad:
        in.capture = value.a;
        in.num_indices = Rank(value);
        in.unit_stride = HasUnitStride(value);
        for (int d = 0; d < in.num_indices; ++d) {
          const int index = extra_[value.b + d];
          in.indices[d] = IsKv(index) && in.unit_stride ? RowOperand{0, kKv} : Operand(index);
        }
        break;
      default: {
        if (IsKvAffine(value, &in)) {
          in.op = kRowKvAffine;
          break;
        }
        if (value.op == kI32ToF32 && FuseKvConversion(value, &in, out)) break;
        if ((value.op == kAddF || value.op == kSubF) && FuseProduct(value, &in, out)) break;
        const bool takes_kv = IsComparisonI(value.op) && IsKvWithScalar(value);
        in.a = takes_kv && IsKv(value.a) ? RowOperand{0, kKv} : Operand(value.a);
        if (value.num_operands >= 2) in.b = takes_kv && IsKv(value.b) ? RowOperand{0, kKv} : Operand(value.b);
        if (value.num_operands >= 3) in.c = Operand(value.c);
      }
    }
    position_[id] = int(out->size());
    out->push_back(in);
  }

  bool FuseKvConversion(const Program::Value& value, RowInstruction* in, std::vector<RowInstruction>* out) {
    if (IsKv(value.a)) {
      in->a = {int(values_.size()), kScalar};  // the slot that holds 0
      in->kv_form = kAPlusKv;
    } else if (IsScalar(value.a) || !IsKvAffine(values_[value.a], in)) {
      return false;
    } else if (num_uses_[value.a] == 1 && values_[value.a].stage == value.stage) {
      (*out)[position_[value.a]].op = kFusedAway;
    }
    in->op = kRowKvAffineF;
    return true;
  }

  bool FuseProduct(const Program::Value& value, RowInstruction* in, std::vector<RowInstruction>* out) {
    for (const bool is_second : {true, false}) {
      const int product = is_second ? value.b : value.a, other = is_second ? value.a : value.b;
      if (values_[product].op != kMulF || values_[product].stage != value.stage || num_uses_[product] != 1) continue;
      const RowInstruction mul = (*out)[position_[product]];
      bool is_intact = true;  // nobody has reused the registers of the factors since
      for (int k = position_[product] + 1; k < int(out->size()); ++k) {
        const RowInstruction& later = (*out)[k];
        if (later.op == kFusedAway) continue;
        for (const RowOperand x : {mul.a, mul.b}) is_intact &= x.kind == kScalar || x.index != later.dst;
      }
      if (!is_intact) continue;
      in->op = value.op == kAddF ? int(kFmaF) : is_second ? int(kRowFnma) : int(kRowFms);
      in->a = mul.a;
      in->b = mul.b;
      in->c = Operand(other);
      (*out)[position_[product]].op = kFusedAway;
      return true;
    }
    return false;
  }

  const std::vector<Program::Value>& values_;
  const std::vector<int>& extra_;
  const Capture* captures_;
  std::vector<int> num_uses_;
  std::vector<int> position_;  // of a value's instruction in its list
  bool needs_kv_row_ = false;
};

}  // namespace

std::string Program::Decode(const int32_t* code, int64_t size, const Capture* captures, int num_captures) {
  *this = Program();
  if (size < kHeaderSize) return "program: the bytecode has no header";
  if (code[0] != kFormatVersion) {
    return "program: bytecode version " + std::to_string(code[0]) + ", expected " + std::to_string(kFormatVersion);
  }
  const int64_t num_values = code[1], num_grads = code[5], num_extra = code[6];
  if (num_values < 1 || num_grads < 0 || num_extra < 0 ||
      kHeaderSize + 2 * num_grads + kRecordSize * num_values + num_extra != size) {
    return "program: " + std::to_string(size) + " integers of bytecode do not fit its header";
  }
  // A program needs at most one register per value; the bound also keeps a damaged header from
  // asking for the moon.
  if (code[2] < 0 || code[2] > num_values) return "program: " + std::to_string(code[2]) + " registers";
  for (int k = 0; k < num_captures; ++k) {
    if (captures[k].rank < 0 || captures[k].rank > Capture::kMaxRank) {
      return "program: capture " + std::to_string(k) + " has " + std::to_string(captures[k].rank) + " axes, at most " +
             std::to_string(Capture::kMaxRank) + " are supported";
    }
  }
  num_registers_ = code[2];
  const int32_t* pairs = code + kHeaderSize;
  const int32_t* records = pairs + 2 * num_grads;
  extra_.assign(records + kRecordSize * num_values, code + size);

  std::string error = Check(records, int(num_values), captures, num_captures);
  const auto is_id = [&](int id) { return id >= 0 && id < num_values; };
  if (error.empty()) {
    result_ = code[3];
    dscore_ = code[4];
    if (!is_id(result_) || values_[result_].type == kTypeI32 || values_[result_].stage > kStageVector) {
      error = "program: the result " + std::to_string(result_) + " is not a score or a mask";
    } else if (dscore_ != -1 && (!is_id(dscore_) || values_[dscore_].type != kTypeF32)) {
      error = "program: the derivative " + std::to_string(dscore_) + " is not a float value";
    } else if (values_[result_].type == kTypeBool ? dscore_ != -1 : false) {
      error = "program: a mask has no derivative";
    } else if (dscore_ == -1 && num_grads != 0) {
      error = "program: gradients of loads without a derivative of the score";
    }
  }
  load_grads_.reserve(num_grads);
  for (int64_t k = 0; k < num_grads && error.empty(); ++k) {
    const int load = pairs[2 * k], value = pairs[2 * k + 1];
    if (!is_id(load) || !is_id(value) || values_[load].op != kLoad || values_[load].type != kTypeF32 ||
        values_[load].stage > kStageVector || values_[value].type != kTypeF32) {
      error = "program: load gradient " + std::to_string(k) + " is not a pair of a float load and a float value";
    } else {
      load_grads_.push_back({values_[load].a, load, value});
    }
  }
  if (error.empty() && values_[result_].type == kTypeBool) {
    for (const Value& value : values_) {
      if (value.op == kInput && (value.a == kInputScore || value.a == kInputCt)) {
        error = "program: a mask reads the score";
      }
    }
  }
  if (error.empty()) error = CheckRegisters(captures);
  if (error.empty()) {
    BuildRowInstructions(captures);
  } else {
    *this = Program();
  }
  return error;
}

// Checks each record by itself and against the values before it, and fills values_ and the scalar
// stages.
std::string Program::Check(const int32_t* records, int num_values, const Capture* captures, int num_captures) {
  values_.reserve(num_values);
  for (int id = 0; id < num_values; ++id) {
    const int32_t* r = records + int64_t{kRecordSize} * id;
    const auto fail = [&](const std::string& what) {
      const std::string name = r[0] >= 0 && r[0] < kNumProgramOps ? OpName(r[0]) : "op " + std::to_string(r[0]);
      return "program: value " + std::to_string(id) + " (" + name + ") " + what;
    };
    if (r[0] < 0 || r[0] >= kNumProgramOps) return fail("is no operation");
    if (r[1] < kTypeF32 || r[1] > kTypeBool) return fail("has type " + std::to_string(r[1]));
    if (r[2] < kStageHead || r[2] > kStageDerivative) return fail("has stage " + std::to_string(r[2]));
    Value value = {ProgramOp(r[0]), ProgramType(r[1]), ProgramStage(r[2]), r[3], r[4], r[5], r[6], r[7], 0};
    // The type of operand `x`, or kNone if `value` may not read it.
    const auto operand_type = [&](int x) {
      return x >= 0 && x < id && values_[x].stage <= value.stage ? int(values_[x].type) : int(kNone);
    };
    switch (value.op) {
      case kConst:
        value.stage = kStageHead;  // whatever was asked for: it costs nothing as a scalar
        if (value.type == kTypeBool) value.imm = value.imm != 0 ? -1 : 0;
        break;
      case kInput: {
        if (value.a < 0 || value.a >= kNumInputs) return fail("reads input " + std::to_string(value.a));
        const InputInfo& input = kInputs[value.a];
        if (value.type != input.type || value.stage < input.stage) return fail("has the wrong type or stage");
        // As early as it is known. The score even has to be: the caller may change its row before
        // stage 3.
        if (value.a != kInputKv) value.stage = input.stage;
        break;
      }
      case kLoad: {
        if (value.a < 0 || value.a >= num_captures) return fail("reads capture " + std::to_string(value.a));
        const Capture& capture = captures[value.a];
        if (value.type != TypeOf(capture.dtype)) return fail("has another type than its capture");
        if (value.b < 0 || value.b > int64_t(extra_.size()) - capture.rank) return fail("has no indices");
        for (int d = 0; d < capture.rank; ++d) {
          if (capture.dims[d] < 0) return fail("reads an array of negative size");
          if (operand_type(extra_[value.b + d]) != kTypeI32) return fail("has a wrong index");
        }
        break;
      }
      case kSelect:
        if (operand_type(value.a) != kTypeBool || operand_type(value.b) != value.type ||
            operand_type(value.c) != value.type) {
          return fail("has a wrong operand");
        }
        value.num_operands = 3;
        break;
      default: {
        const Signature signature = SignatureOf(value.op);
        if (value.type != signature.result) return fail("has the wrong type");
        const int operands[] = {value.a, value.b, value.c};
        for (int k = 0; k < 3; ++k) {
          if (signature.operands[k] == kNone) break;
          if (operand_type(operands[k]) != signature.operands[k]) return fail("has a wrong operand");
          ++value.num_operands;
        }
      }
    }
    if (value.stage >= kStageVector && (value.reg < 0 || value.reg >= num_registers_)) {
      return fail("uses register " + std::to_string(value.reg));
    }
    values_.push_back(value);
    if (value.stage == kStageHead) head_stage_.push_back(id);
    if (value.stage == kStageRow) row_stage_.push_back(id);
  }
  return "";
}

// Follows which value each register holds, in the order of execution: everything read must still be
// there.
std::string Program::CheckRegisters(const Capture* captures) const {
  std::vector<int> owner(num_registers_, -1);
  const auto holds = [&](int id) { return is_scalar(id) || owner[values_[id].reg] == id; };
  const auto fail = [](int id) {
    return "program: the register of value " + std::to_string(id) + " is overwritten before its last use";
  };
  for (const ProgramStage stage : {kStageVector, kStageDerivative}) {
    for (int id = 0; id < int(values_.size()); ++id) {
      const Value& value = values_[id];
      if (value.stage != stage) continue;
      int missing = -1;
      ForEachOperand(value, extra_, value.op == kLoad ? captures[value.a].rank : 0, [&](int x) {
        if (!holds(x)) missing = x;
      });
      if (missing >= 0) return fail(missing);
      owner[value.reg] = id;
    }
    if (stage == kStageVector && !holds(result_)) return fail(result_);
  }
  if (dscore_ >= 0 && !holds(dscore_)) return fail(dscore_);
  for (const LoadGrad& grad : load_grads_) {
    if (!holds(grad.value)) return fail(grad.value);
    for (int d = 0; d < captures[grad.capture].rank; ++d) {
      const int index = extra_[values_[grad.load].b + d];
      // The kv indices themselves are known without a register.
      if (values_[index].op != kInput && !holds(index)) return fail(index);
    }
  }
  return "";
}

void Program::BuildRowInstructions(const Capture* captures) {
  RowInstructionBuilder builder(values_, extra_, captures);
  builder.CountUses();
  builder.CountUse(result_);
  if (dscore_ >= 0) builder.CountUse(dscore_);
  for (const LoadGrad& grad : load_grads_) builder.CountUse(grad.value);

  // The caller's row can stand in for the register of an input if nothing touches that register
  // before the input is read. Not with gradients: what the caller does to its rows must not change
  // what AddLoadGrads reads.
  const auto alias = [&](ProgramInput input, ProgramStage stage) {
    int reg = -1;
    for (const Value& value : values_) {
      if (value.op == kInput && value.a == input) {
        reg = value.reg;
        break;
      }
    }
    if (reg < 0) return -1;
    for (const Value& value : values_) {
      if (value.stage != stage) continue;
      if (value.op == kInput && value.a == input) return reg;
      bool touches = value.reg == reg;
      ForEachOperand(value, extra_, value.op == kLoad ? captures[value.a].rank : 0,
                     [&](int x) { touches |= !is_scalar(x) && values_[x].reg == reg; });
      if (touches) return -1;
    }
    return -1;
  };
  if (!has_derivative()) score_register_ = alias(kInputScore, kStageVector);
  if (load_grads_.empty()) ct_register_ = alias(kInputCt, kStageDerivative);
  const int score_row = score_register_ >= 0 ? score_register_ : num_registers_ + kScoreRow;
  const int ct_row = ct_register_ >= 0 ? ct_register_ : num_registers_ + kCtRow;
  forward_.reserve(values_.size());
  builder.Build(kStageVector, score_row, ct_row, &forward_);
  if (has_derivative()) {
    derivative_.reserve(values_.size());
    builder.Build(kStageDerivative, score_row, ct_row, &derivative_);
  }
}

}  // namespace fkl
