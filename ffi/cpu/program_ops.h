// The operations of a program, in one list for the whole project: the number of an operation in the
// bytecode is its position here.
//
// Plain data only: this header is also read by the instruction-set units, which must not include
// standard headers (an inline function compiled there with AVX-512 could be kept by the linker for
// the whole library).
#ifndef FKL_FFI_CPU_PROGRAM_OPS_H_
#define FKL_FFI_CPU_PROGRAM_OPS_H_

namespace fkl {

// X(identifier, name in the canonical text)
#define FKL_PROGRAM_OPS(X)                                                  \
  X(Const, "const")                                                         \
  X(Input, "input")                                                         \
  X(Load, "load")                                                           \
  X(AddF, "add.f32")                                                        \
  X(SubF, "sub.f32")                                                        \
  X(MulF, "mul.f32")                                                        \
  X(DivF, "div.f32")                                                        \
  X(RemF, "rem.f32")                                                        \
  X(MaxF, "max.f32")                                                        \
  X(MinF, "min.f32")                                                        \
  X(PowF, "pow.f32")                                                        \
  X(Atan2F, "atan2.f32")                                                    \
  X(FmaF, "fma.f32") /* a * b + c */                                        \
  X(NegF, "neg.f32")                                                        \
  X(AbsF, "abs.f32")                                                        \
  X(SignF, "sign.f32") /* 0 and NaN are returned as they are */             \
  X(SqrtF, "sqrt.f32")                                                      \
  X(RsqrtF, "rsqrt.f32")                                                    \
  X(ExpF, "exp.f32")                                                        \
  X(Exp2F, "exp2.f32")                                                      \
  X(Expm1F, "expm1.f32")                                                    \
  X(LogF, "log.f32")                                                        \
  X(Log1pF, "log1p.f32")                                                    \
  X(TanhF, "tanh.f32")                                                      \
  X(SinF, "sin.f32")                                                        \
  X(CosF, "cos.f32")                                                        \
  X(TanF, "tan.f32")                                                        \
  X(ErfF, "erf.f32")                                                        \
  X(FloorF, "floor.f32")                                                    \
  X(CeilF, "ceil.f32")                                                      \
  X(RoundEvenF, "round_even.f32")                                           \
  X(RoundAwayF, "round_away.f32")                                           \
  X(RoundBf16, "round_bf16.f32") /* to the nearest bfloat16, kept as f32 */ \
  X(RoundF16, "round_f16.f32")                                              \
  X(IsFiniteF, "is_finite.f32")                                             \
  X(EqF, "eq.f32")                                                          \
  X(NeF, "ne.f32")                                                          \
  X(LtF, "lt.f32")                                                          \
  X(LeF, "le.f32")                                                          \
  X(AddI, "add.i32")                                                        \
  X(SubI, "sub.i32")                                                        \
  X(MulI, "mul.i32")                                                        \
  X(DivI, "div.i32")                                                        \
  X(RemI, "rem.i32")                                                        \
  X(MaxI, "max.i32")                                                        \
  X(MinI, "min.i32")                                                        \
  X(NegI, "neg.i32")                                                        \
  X(AbsI, "abs.i32")                                                        \
  X(SignI, "sign.i32")                                                      \
  X(AndI, "and.i32")                                                        \
  X(OrI, "or.i32")                                                          \
  X(XorI, "xor.i32")                                                        \
  X(NotI, "not.i32")                                                        \
  X(ShlI, "shl.i32")   /* a shift of 32 or more gives 0 (ShrA: the sign) */ \
  X(ShrAI, "shra.i32") /* arithmetic */                                     \
  X(ShrLI, "shrl.i32") /* logical */                                        \
  X(EqI, "eq.i32")                                                          \
  X(NeI, "ne.i32")                                                          \
  X(LtI, "lt.i32")                                                          \
  X(LeI, "le.i32")                                                          \
  X(AndB, "and.bool")                                                       \
  X(OrB, "or.bool")                                                         \
  X(XorB, "xor.bool") /* also "not equal" of bools */                       \
  X(NotB, "not.bool")                                                       \
  X(Select, "select") /* a (bool) ? b : c, of b's type */                   \
  X(I32ToF32, "i32_to_f32")                                                 \
  X(F32ToI32, "f32_to_i32")                                                 \
  X(BoolToF32, "bool_to_f32")                                               \
  X(BoolToI32, "bool_to_i32")                                               \
  X(BitsF32ToI32, "bits_f32_to_i32")                                        \
  X(BitsI32ToF32, "bits_i32_to_f32")

enum ProgramOp : int {
#define FKL_X(identifier, name) k##identifier,
  FKL_PROGRAM_OPS(FKL_X)
#undef FKL_X
      kNumProgramOps
};

enum ProgramType : int { kTypeF32 = 0, kTypeI32 = 1, kTypeBool = 2 };
enum ProgramStage : int { kStageHead = 0, kStageRow = 1, kStageVector = 2, kStageDerivative = 3 };
enum ProgramInput : int { kInputScore = 0, kInputB = 1, kInputH = 2, kInputQ = 3, kInputKv = 4, kInputCt = 5 };

}  // namespace fkl

#endif  // FKL_FFI_CPU_PROGRAM_OPS_H_
