// A decoded program (docs/internals.md section 2) and its evaluation: scalars, intervals and,
// through the instruction set's table, rows.
#ifndef FKL_FFI_CPU_PROGRAM_H_
#define FKL_FFI_CPU_PROGRAM_H_

#include <cstdint>
#include <string>
#include <vector>

#include "cpu/isa.h"

namespace fkl {

// A closed range of int32 indices.
struct IndexRange {
  int64_t first;
  int64_t last;
};

enum class Liveness { kNone, kAll, kMixed };

// Immutable after decoding; shared by all workers of a call.
class Program {
 public:
  struct Value {
    ProgramOp op;
    ProgramType type;
    ProgramStage stage;
    int reg;
    int a, b, c;
    int imm;
    int num_operands;  // of a, b, c that are value ids
  };
  struct LoadGrad {
    int capture;
    int load;   // value id of the load
    int value;  // value id of its gradient
  };

  // Checks and decodes the bytecode; an empty string is success, anything else says what is wrong
  // with it. Every id, register, capture number and operand order is checked, so that a damaged
  // module cannot crash.
  std::string Decode(const int32_t* code, int64_t size, const Capture* captures, int num_captures);

  bool empty() const { return values_.empty(); }
  bool is_mask() const { return !empty() && values_[result_].type == kTypeBool; }
  bool has_derivative() const { return dscore_ >= 0; }
  const std::vector<LoadGrad>& load_grads() const { return load_grads_; }

  // True for a bool program that is false / true for every index in the ranges (interval
  // arithmetic; kMixed when it cannot tell). Captures as given to a ProgramRunner.
  Liveness Classify(const Capture* captures, IndexRange b, IndexRange h, IndexRange q, IndexRange kv) const;

 private:
  friend class ProgramRunner;

  bool is_scalar(int id) const { return values_[id].stage <= kStageRow; }
  std::string Check(const int32_t* records, int num_values, const Capture* captures, int num_captures);
  std::string CheckRegisters(const Capture* captures) const;
  void BuildRowInstructions(const Capture* captures);

  std::vector<Value> values_;
  std::vector<int> extra_;
  std::vector<int> head_stage_, row_stage_;  // value ids in order
  std::vector<RowInstruction> forward_, derivative_;
  std::vector<LoadGrad> load_grads_;
  int num_registers_ = 0;
  int score_register_ = -1;  // the caller's score row takes its place; -1: the program copies the row or reads none
  int ct_register_ = -1;     // the same for the cotangent row
  int result_ = -1;
  int dscore_ = -1;
};

// Where the gradient of one captured array goes: `data` has the capture's shape, float32, at the
// same vmap element.
struct CaptureGrad {
  float* data = nullptr;   // null: not asked for
  bool is_shared = false;  // several workers add at once: use atomic adds
};

// Rows that follow the program's own registers.
enum ExtraRegister : int { kScoreRow, kCtRow, kResultRow, kDscoreRow, kGradRow, kNumExtraRegisters };

// Evaluates a program for one worker; holds its registers. Bind* go from outer to inner; binding an
// outer level requires binding the inner ones again.
class ProgramRunner {
 public:
  // Keeps references to both.
  ProgramRunner(const Program& program, const IsaKernels& isa);
  ProgramRunner(const ProgramRunner&) = delete;
  ProgramRunner& operator=(const ProgramRunner&) = delete;
  ProgramRunner(ProgramRunner&&) = default;
  ProgramRunner& operator=(ProgramRunner&&) = default;

  void BindCaptures(const Capture* captures);
  void BindHead(int32_t b, int32_t h);
  void BindRow(int32_t q_idx);

  // Score programs: the modified scores of `num_lanes` keys from global index kv_idx0. `score` is
  // 64-byte aligned with kRowWidth lanes' room up to the next multiple of the vector width; the
  // result may be `score` itself or a register that the next run overwrites. A program without
  // derivative may use `score` as scratch.
  const float* RunScore(float* score, int32_t kv_idx0, int num_lanes);

  // After RunScore on the same row: the derivative with respect to the score for the cotangent row
  // `ct`, which is used as scratch and may be the result; dead lanes (bit clear in live_bits; null
  // = all live) are exactly 0.
  const float* RunDerivative(float* ct, const uint32_t* live_bits, int num_lanes);
  // After RunDerivative: adds the gradients of captured arrays, grads[capture], dead lanes
  // excluded.
  void AddLoadGrads(const CaptureGrad* grads, const uint32_t* live_bits, int num_lanes);

  // Mask programs: bit c of bits = live, for c < num_lanes; all kRowWidth / 32 words are written.
  void RunMask(int32_t kv_idx0, int num_lanes, uint32_t* bits);

 private:
  void Evaluate(const std::vector<int>& ids);
  Scalar EvaluateOne(const Program::Value& value) const;
  void Run(const std::vector<RowInstruction>& instructions, int num_lanes);
  // The row of value `id`, written to `spare` if it is a scalar.
  float* RowOf(int id, ExtraRegister spare, int num_lanes);
  float* OwnRegister(int reg);
  void AddLoadGrad(const Program::LoadGrad& load_grad, const CaptureGrad& grad, const uint32_t* live_bits,
                   int num_lanes);

  const Program* program_;
  const IsaKernels* isa_;
  const Capture* captures_ = nullptr;
  int32_t b_ = 0, h_ = 0, q_idx_ = 0;
  std::vector<Scalar> scalars_;  // by value id, then one 0
  std::vector<float> register_storage_;
  std::vector<float*> registers_;  // the program's, then the rows below
  int32_t kv_idx0_ = 0;
};

}  // namespace fkl

#endif  // FKL_FFI_CPU_PROGRAM_H_
