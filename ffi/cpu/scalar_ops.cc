#include "cpu/scalar_ops.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "cpu/convert.inc"

namespace fkl {
namespace {

constexpr int kIntMin = std::numeric_limits<int32_t>::min();
constexpr int kIntMax = std::numeric_limits<int32_t>::max();

float RoundBf16(float x) {
  if (std::isnan(x)) return x;
  const uint32_t bits = uint32_t(BitsOfFloat(x));
  return FloatOfBits((bits + 0x7fffu + ((bits >> 16) & 1)) & 0xffff0000u);
}

float RoundF16(float x) {
  const float ax = std::fabs(x);
  if (std::isnan(x)) return x;
  if (ax >= 65520.0f) return std::copysign(std::numeric_limits<float>::infinity(), x);
  if (ax < 6.103515625e-5f) return std::copysign((ax + 0.5f) - 0.5f, x);  // a multiple of 2^-24
  const uint32_t bits = uint32_t(BitsOfFloat(x));
  return FloatOfBits((bits + 0xfffu + ((bits >> 13) & 1)) & 0xffffe000u);
}

int FloatToInt(float x) {
  if (std::isnan(x)) return 0;
  if (x >= 2147483648.0f) return kIntMax;
  return x < -2147483648.0f ? kIntMin : int(x);
}

// Integer arithmetic wraps, so it is done unsigned.
int Wrap(uint32_t x) { return int(x); }
int Divide(int a, int b) { return b == 0 ? -1 : b == -1 ? Wrap(-uint32_t(a)) : a / b; }
int Remainder(int a, int b) { return b == 0 ? a : b == -1 ? 0 : a % b; }
int ShiftLeft(int a, int b) { return uint32_t(b) < 32 ? Wrap(uint32_t(a) << b) : 0; }
int ShiftRight(int a, int b) { return a >> (uint32_t(b) < 32 ? b : 31); }
int ShiftRightLogical(int a, int b) { return uint32_t(b) < 32 ? Wrap(uint32_t(a) >> b) : 0; }

float Max(float a, float b) { return std::isnan(a) || a > b ? a : b; }
float Min(float a, float b) { return std::isnan(a) || a < b ? a : b; }

Scalar OfFloat(float x) {
  Scalar s;
  s.f = x;
  return s;
}
Scalar OfInt(int x) {
  Scalar s;
  s.i = x;
  return s;
}
Scalar OfBool(bool x) { return OfInt(x ? -1 : 0); }

}  // namespace

Scalar ComputeScalar(ProgramOp op, Scalar a, Scalar b, Scalar c) {
  const float x = a.f, y = b.f;
  const int i = a.i, j = b.i;
  const uint32_t u = uint32_t(i), v = uint32_t(j);
  switch (op) {
    case kAddF: return OfFloat(x + y);
    case kSubF: return OfFloat(x - y);
    case kMulF: return OfFloat(x * y);
    case kDivF: return OfFloat(x / y);
    case kRemF: return OfFloat(std::fmod(x, y));
    case kMaxF: return OfFloat(Max(x, y));
    case kMinF: return OfFloat(Min(x, y));
    case kPowF: return OfFloat(std::pow(x, y));
    case kAtan2F: return OfFloat(std::atan2(x, y));
    case kFmaF: return OfFloat(x * y + c.f);
    case kNegF: return OfFloat(-x);
    case kAbsF: return OfFloat(std::fabs(x));
    case kSignF: return OfFloat(x == 0 || std::isnan(x) ? x : std::copysign(1.0f, x));
    case kSqrtF: return OfFloat(std::sqrt(x));
    case kRsqrtF: return OfFloat(1.0f / std::sqrt(x));
    case kExpF: return OfFloat(std::exp(x));
    case kExp2F: return OfFloat(std::exp2(x));
    case kExpm1F: return OfFloat(std::expm1(x));
    case kLogF: return OfFloat(std::log(x));
    case kLog1pF: return OfFloat(std::log1p(x));
    case kTanhF: return OfFloat(std::tanh(x));
    case kSinF: return OfFloat(std::sin(x));
    case kCosF: return OfFloat(std::cos(x));
    case kTanF: return OfFloat(std::tan(x));
    case kErfF: return OfFloat(std::erf(x));
    case kFloorF: return OfFloat(std::floor(x));
    case kCeilF: return OfFloat(std::ceil(x));
    case kRoundEvenF: return OfFloat(std::nearbyint(x));
    case kRoundAwayF: return OfFloat(std::round(x));
    case kRoundBf16: return OfFloat(RoundBf16(x));
    case kRoundF16: return OfFloat(RoundF16(x));
    case kIsFiniteF: return OfBool(std::isfinite(x));
    case kEqF: return OfBool(x == y);
    case kNeF: return OfBool(x != y);
    case kLtF: return OfBool(x < y);
    case kLeF: return OfBool(x <= y);
    case kAddI: return OfInt(Wrap(u + v));
    case kSubI: return OfInt(Wrap(u - v));
    case kMulI: return OfInt(Wrap(u * v));
    case kDivI: return OfInt(Divide(i, j));
    case kRemI: return OfInt(Remainder(i, j));
    case kMaxI: return OfInt(std::max(i, j));
    case kMinI: return OfInt(std::min(i, j));
    case kNegI: return OfInt(Wrap(-u));
    case kAbsI: return OfInt(i < 0 ? Wrap(-u) : i);
    case kSignI: return OfInt((i > 0) - (i < 0));
    case kAndI:
    case kAndB: return OfInt(i & j);
    case kOrI:
    case kOrB: return OfInt(i | j);
    case kXorI:
    case kXorB: return OfInt(i ^ j);
    case kNotI:
    case kNotB: return OfInt(~i);
    case kShlI: return OfInt(ShiftLeft(i, j));
    case kShrAI: return OfInt(ShiftRight(i, j));
    case kShrLI: return OfInt(ShiftRightLogical(i, j));
    case kEqI: return OfBool(i == j);
    case kNeI: return OfBool(i != j);
    case kLtI: return OfBool(i < j);
    case kLeI: return OfBool(i <= j);
    case kSelect: return i != 0 ? b : c;
    case kI32ToF32: return OfFloat(float(i));
    case kF32ToI32: return OfInt(FloatToInt(x));
    case kBoolToF32: return OfFloat(i != 0 ? 1.0f : 0.0f);
    case kBoolToI32: return OfInt(i != 0 ? 1 : 0);
    case kBitsF32ToI32:
    case kBitsI32ToF32: return a;
    case kConst:
    case kInput:
    case kLoad:
    case kNumProgramOps: break;
  }
  return OfInt(0);
}

}  // namespace fkl
