// Evaluation of programs: scalars of stages 0 and 1 with libm, rows through the instruction set's
// table.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/convert.inc"
#include "cpu/program.h"
#include "cpu/scalar_ops.h"

namespace fkl {
namespace {

int64_t ClampIndex(int64_t index, int64_t size) { return index < 0 ? 0 : index >= size ? size - 1 : index; }

bool IsLive(const uint32_t* live_bits, int lane) {
  return live_bits == nullptr || ((live_bits[lane / 32] >> (lane % 32)) & 1) != 0;
}

// No std::atomic_ref: the gradient is an ordinary array for everybody else.
void AtomicAdd(float* address, float x) {
  int* bits = reinterpret_cast<int*>(address);
  int old = __atomic_load_n(bits, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(bits, &old, BitsOfFloat(FloatOfBits(unsigned(old)) + x),
                                      /*weak=*/true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

void Add(const CaptureGrad& grad, int64_t offset, float x) {
  if (grad.is_shared) {
    if (x != 0) AtomicAdd(grad.data + offset, x);
  } else {
    grad.data[offset] += x;
  }
}

Scalar OfInt(int x) {
  Scalar s;
  s.i = x;
  return s;
}

}  // namespace

ProgramRunner::ProgramRunner(const Program& program, const IsaKernels& isa)
    : program_(&program), isa_(&isa), scalars_(program.values_.size() + 1, OfInt(0)) {
  // One vector more than the registers need, to align the first.
  constexpr int kAlignment = 16;  // floats
  const int num_registers = program.num_registers_ + kNumExtraRegisters;
  register_storage_.resize(size_t(num_registers) * kRowWidth + kAlignment);
  const size_t misalignment = reinterpret_cast<uintptr_t>(register_storage_.data()) % 64;
  float* first = register_storage_.data() + (64 - misalignment) / sizeof(float) % kAlignment;
  for (int reg = 0; reg < num_registers; ++reg) registers_.push_back(first + size_t(reg) * kRowWidth);
  for (size_t id = 0; id < program.values_.size(); ++id) {
    if (program.values_[id].op == kConst) scalars_[id].i = program.values_[id].imm;
  }
}

void ProgramRunner::BindCaptures(const Capture* captures) { captures_ = captures; }

void ProgramRunner::BindHead(int32_t b, int32_t h) {
  b_ = b;
  h_ = h;
  Evaluate(program_->head_stage_);
}

void ProgramRunner::BindRow(int32_t q_idx) {
  q_idx_ = q_idx;
  Evaluate(program_->row_stage_);
}

void ProgramRunner::Evaluate(const std::vector<int>& ids) {
  for (const int id : ids) scalars_[id] = EvaluateOne(program_->values_[id]);
}

Scalar ProgramRunner::EvaluateOne(const Program::Value& value) const {
  switch (value.op) {
    case kConst: return OfInt(value.imm);
    case kInput: return OfInt(value.a == kInputB ? b_ : value.a == kInputH ? h_ : q_idx_);
    case kLoad: {
      const Capture& capture = captures_[value.a];
      int64_t offset = 0;
      for (int d = 0; d < capture.rank; ++d) {
        if (capture.dims[d] == 0) return OfInt(0);  // nothing there to read
        offset += ClampIndex(scalars_[program_->extra_[value.b + d]].i, capture.dims[d]) * capture.strides[d];
      }
      Scalar element = OfInt(0);
      WithReader(capture.dtype, [&](auto reader) { element.i = reader.At(capture.data, offset); });
      return element;
    }
    default:
      // Operands that the operation lacks have any number in their field: do not follow it.
      return ComputeScalar(value.op, scalars_[value.a], value.num_operands >= 2 ? scalars_[value.b] : OfInt(0),
                           value.num_operands >= 3 ? scalars_[value.c] : OfInt(0));
  }
}

void ProgramRunner::Run(const std::vector<RowInstruction>& instructions, int num_lanes) {
  const RowContext context = {registers_.data(), scalars_.data(), captures_, kv_idx0_, num_lanes};
  isa_->run_row(instructions.data(), instructions.data() + instructions.size(), context);
}

float* ProgramRunner::OwnRegister(int reg) {
  // The extra rows that hold results are never replaced, so they tell where the storage is.
  return registers_[program_->num_registers_ + kResultRow] +
         int64_t{reg - program_->num_registers_ - kResultRow} * kRowWidth;
}

float* ProgramRunner::RowOf(int id, ExtraRegister spare, int num_lanes) {
  if (!program_->is_scalar(id)) return registers_[program_->values_[id].reg];
  float* row = registers_[program_->num_registers_ + spare];
  std::fill_n(row, num_lanes, scalars_[id].f);
  return row;
}

const float* ProgramRunner::RunScore(float* score, int32_t kv_idx0, int num_lanes) {
  const Program& program = *program_;
  kv_idx0_ = kv_idx0;
  if (program.ct_register_ >= 0) registers_[program.ct_register_] = OwnRegister(program.ct_register_);
  registers_[program.score_register_ >= 0 ? program.score_register_ : program.num_registers_ + kScoreRow] = score;
  Run(program.forward_, num_lanes);
  return RowOf(program.result_, kResultRow, num_lanes);
}

const float* ProgramRunner::RunDerivative(float* ct, const uint32_t* live_bits, int num_lanes) {
  const Program& program = *program_;
  registers_[program.ct_register_ >= 0 ? program.ct_register_ : program.num_registers_ + kCtRow] = ct;
  Run(program.derivative_, num_lanes);
  float* dscore = RowOf(program.dscore_, kDscoreRow, num_lanes);
  if (live_bits != nullptr) isa_->select_row(dscore, live_bits, num_lanes);
  return dscore;
}

void ProgramRunner::AddLoadGrads(const CaptureGrad* grads, const uint32_t* live_bits, int num_lanes) {
  for (const Program::LoadGrad& load_grad : program_->load_grads_) {
    const CaptureGrad& grad = grads[load_grad.capture];
    if (grad.data == nullptr) continue;
    AddLoadGrad(load_grad, grad, live_bits, num_lanes);
  }
}

void ProgramRunner::AddLoadGrad(const Program::LoadGrad& load_grad, const CaptureGrad& grad, const uint32_t* live_bits,
                                int num_lanes) {
  const Program& program = *program_;
  const Program::Value& load = program.values_[load_grad.load];
  const Capture& capture = captures_[load_grad.capture];

  // The gradient is a dense array. Axes with the same index in every lane give the base, the others
  // are gathered.
  struct VaryingIndex {
    const float* row;  // null: kv itself
    int64_t size, stride;
  };
  VaryingIndex varying[Capture::kMaxRank];
  int num_varying = 0;
  int64_t base = 0, stride = 1;
  for (int d = capture.rank - 1; d >= 0; --d) {
    const int64_t size = capture.dims[d];
    if (size == 0) return;
    const int index = program.extra_[load.b + d];
    if (program.is_scalar(index)) {
      base += ClampIndex(scalars_[index].i, size) * stride;
    } else {
      const bool is_kv = program.values_[index].op == kInput;
      varying[num_varying++] = {is_kv ? nullptr : registers_[program.values_[index].reg], size, stride};
    }
    stride *= size;
  }

  const float* values = RowOf(load_grad.value, kGradRow, num_lanes);
  float row[kRowWidth];  // dead lanes are 0
  for (int c = 0; c < num_lanes; ++c) row[c] = IsLive(live_bits, c) ? values[c] : 0.0f;
  if (num_varying == 0) {
    // Eight running sums: a fixed order that vectorises.
    float sums[8] = {};
    for (int c = 0; c < num_lanes; ++c) sums[c % 8] += row[c];
    Add(grad, base, ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7])));
    return;
  }
  const auto index_at = [&](const VaryingIndex& x, int lane) -> int {
    return x.row == nullptr ? int(uint32_t(kv_idx0_) + uint32_t(lane)) : BitsOfFloat(x.row[lane]);
  };
  if ((load.imm & 1) != 0 && num_varying == 1 && varying[0].stride == 1) {
    const int64_t first = index_at(varying[0], 0);
    if (first >= 0 && first + num_lanes <= varying[0].size) {
      float* out = grad.data + base + first;
      if (!grad.is_shared) {
        for (int c = 0; c < num_lanes; ++c) out[c] += row[c];
      } else {
        for (int c = 0; c < num_lanes; ++c) {
          if (row[c] != 0) AtomicAdd(out + c, row[c]);
        }
      }
      return;
    }
  }
  for (int c = 0; c < num_lanes; ++c) {
    if (!IsLive(live_bits, c)) continue;
    int64_t offset = base;
    for (int k = 0; k < num_varying; ++k) {
      offset += ClampIndex(index_at(varying[k], c), varying[k].size) * varying[k].stride;
    }
    Add(grad, offset, row[c]);
  }
}

void ProgramRunner::RunMask(int32_t kv_idx0, int num_lanes, uint32_t* bits) {
  const Program& program = *program_;
  kv_idx0_ = kv_idx0;
  Run(program.forward_, num_lanes);
  if (!program.is_scalar(program.result_)) {
    const float* row = registers_[program.values_[program.result_].reg];
    isa_->row_to_bits(reinterpret_cast<const int*>(row), num_lanes, bits);
    return;
  }
  const bool is_live = scalars_[program.result_].i != 0;
  for (int word = 0; word < kRowWidth / 32; ++word) {
    const int lanes = std::clamp(num_lanes - 32 * word, 0, 32);
    bits[word] = is_live ? uint32_t((uint64_t{1} << lanes) - 1) : 0;
  }
}

}  // namespace fkl
