// Interval arithmetic over programs: can a mask be false, can it be true, somewhere in a box of
// indices?
//
// Every value gets an enclosure of all that it can be. An int32 value is also kept in the form cq *
// q + ck * kv + r with r in an interval, so that q - kv, and kv - q + q, stay exact. Whatever is
// not worth its code here is "anything". Floats must also enclose what the row interpreter
// computes: it fuses products into sums, multiplies by reciprocals, differs from libm in the last
// places and may flush denormals.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "cpu/convert.inc"
#include "cpu/program.h"
#include "cpu/scalar_ops.h"

namespace fkl {
namespace {

constexpr int64_t kIntMin = std::numeric_limits<int32_t>::min();
constexpr int64_t kIntMax = std::numeric_limits<int32_t>::max();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kMinNormal = std::numeric_limits<float>::min();
constexpr int64_t kMaxBoxElements = 16384;  // of a captured array, read for their minimum and maximum

struct Bounds {
  int64_t low, high;  // i32; bool: 0 and 1
  int64_t cq, ck;     // i32: see above
  int64_t rest_low, rest_high;
  float float_low, float_high;
  bool may_be_nan;

  bool is_single() const { return low == high; }
  bool is_finite() const { return !may_be_nan && float_low > -kInf && float_high < kInf; }
};

// ---- bools and integers

Bounds OfBool(bool can_be_false, bool can_be_true) {
  Bounds x = {};
  x.low = can_be_false ? 0 : 1;
  x.high = can_be_true ? 1 : 0;
  return x;
}

Bounds OfInts(int64_t low, int64_t high) {
  Bounds x = {};
  const bool wraps = low < kIntMin || high > kIntMax;
  x.low = x.rest_low = wraps ? kIntMin : low;
  x.high = x.rest_high = wraps ? kIntMax : high;
  return x;
}

Bounds AnyInt() { return OfInts(kIntMin, kIntMax); }

struct Box {
  IndexRange q, kv;
};

// The extremes of cq * q + ck * kv + [rest].
IndexRange Extremes(const Box& box, int64_t cq, int64_t ck, int64_t rest_low, int64_t rest_high) {
  return {
      (cq >= 0 ? cq * box.q.first : cq * box.q.last) + (ck >= 0 ? ck * box.kv.first : ck * box.kv.last) + rest_low,
      (cq >= 0 ? cq * box.q.last : cq * box.q.first) + (ck >= 0 ? ck * box.kv.last : ck * box.kv.first) + rest_high};
}

// A value known in both ways, [low, high] and the linear form.
Bounds OfLinear(const Box& box, int64_t cq, int64_t ck, int64_t rest_low, int64_t rest_high, int64_t low,
                int64_t high) {
  constexpr int64_t kMaxCoefficient = int64_t{1} << 24, kMaxRest = int64_t{1} << 56;
  if (std::abs(cq) > kMaxCoefficient || std::abs(ck) > kMaxCoefficient || std::abs(rest_low) > kMaxRest ||
      std::abs(rest_high) > kMaxRest) {
    return OfInts(low, high);
  }
  const IndexRange range = Extremes(box, cq, ck, rest_low, rest_high);
  low = std::max(low, range.first);
  high = std::min(high, range.last);
  if (low < kIntMin || high > kIntMax) return AnyInt();  // may wrap, then nothing linear is left
  if (cq == 0 && ck == 0) return OfInts(low, high);
  Bounds x = OfInts(low, high);
  x.cq = cq;
  x.ck = ck;
  x.rest_low = rest_low;
  x.rest_high = rest_high;
  return x;
}

Bounds Add(const Box& box, const Bounds& a, const Bounds& b) {
  return OfLinear(box, a.cq + b.cq, a.ck + b.ck, a.rest_low + b.rest_low, a.rest_high + b.rest_high, a.low + b.low,
                  a.high + b.high);
}

// -1 * x + shift, for shift 0 or -1.
Bounds Negate(const Box& box, const Bounds& a, int64_t shift) {
  return OfLinear(box, -a.cq, -a.ck, shift - a.rest_high, shift - a.rest_low, shift - a.high, shift - a.low);
}

// The exact difference, without wrapping.
IndexRange Difference(const Box& box, const Bounds& a, const Bounds& b) {
  const IndexRange linear = Extremes(box, a.cq - b.cq, a.ck - b.ck, a.rest_low - b.rest_high, a.rest_high - b.rest_low);
  return {std::max(linear.first, a.low - b.high), std::min(linear.last, a.high - b.low)};
}

Bounds Subtract(const Box& box, const Bounds& a, const Bounds& b) {
  return OfLinear(box, a.cq - b.cq, a.ck - b.ck, a.rest_low - b.rest_high, a.rest_high - b.rest_low, a.low - b.high,
                  a.high - b.low);
}

Bounds Multiply(const Box& box, const Bounds& a, const Bounds& b) {
  if (a.is_single() && !b.is_single()) return Multiply(box, b, a);
  const int64_t products[] = {a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high};
  const int64_t low = *std::min_element(products, products + 4), high = *std::max_element(products, products + 4);
  int64_t first, second;
  if (!b.is_single() || __builtin_mul_overflow(a.rest_low, b.low, &first) ||
      __builtin_mul_overflow(a.rest_high, b.low, &second)) {
    return OfInts(low, high);
  }
  return OfLinear(box, a.cq * b.low, a.ck * b.low, std::min(first, second), std::max(first, second), low, high);
}

Bounds Union(const Box& box, const Bounds& a, const Bounds& b) {
  const int64_t low = std::min(a.low, b.low), high = std::max(a.high, b.high);
  if (a.cq != b.cq || a.ck != b.ck) return OfInts(low, high);
  return OfLinear(box, a.cq, a.ck, std::min(a.rest_low, b.rest_low), std::max(a.rest_high, b.rest_high), low, high);
}

Bounds Maximum(const Box& box, const Bounds& a, const Bounds& b) {
  const IndexRange d = Difference(box, a, b);
  if (d.first >= 0) return a;
  if (d.last <= 0) return b;
  Bounds x = Union(box, a, b);
  if (x.low < std::max(a.low, b.low)) {
    x = OfLinear(box, x.cq, x.ck, x.rest_low, x.rest_high, std::max(a.low, b.low), x.high);
  }
  return x;
}

Bounds Divide(const Bounds& a, const Bounds& b) {  // C's, monotone for a positive divisor
  if (!b.is_single() || b.low < 0) return AnyInt();
  return b.low == 0 ? OfInts(-1, -1) : OfInts(a.low / b.low, a.high / b.low);
}

Bounds Remainder(const Box& box, const Bounds& a, const Bounds& b) {
  if (!b.is_single() || b.low < 0) return AnyInt();
  const int64_t divisor = b.low;
  if (divisor == 0) return a;
  const int64_t quotient = a.low / divisor;
  if (quotient == a.high / divisor) {  // the same multiple is taken away everywhere
    return Add(box, a, OfInts(-quotient * divisor, -quotient * divisor));
  }
  return OfInts(a.low < 0 ? std::max(a.low, 1 - divisor) : 0, a.high > 0 ? std::min(a.high, divisor - 1) : 0);
}

Bounds ShiftRight(const Bounds& a, const Bounds& b) {
  if (!b.is_single()) return AnyInt();
  const int count = b.low < 0 || b.low > 31 ? 31 : int(b.low);
  return OfInts(a.low >> count, a.high >> count);
}

Bounds Bitwise(ProgramOp op, const Bounds& a, const Bounds& b) {
  if (a.is_single() && b.is_single()) {
    return op == kAndI  ? OfInts(a.low & b.low, a.low & b.low)
           : op == kOrI ? OfInts(a.low | b.low, a.low | b.low)
                        : OfInts(a.low ^ b.low, a.low ^ b.low);
  }
  if (op == kAndI) {
    if (a.low >= 0) return OfInts(0, b.low >= 0 ? std::min(a.high, b.high) : a.high);
    return b.low >= 0 ? OfInts(0, b.high) : AnyInt();
  }
  if (a.low < 0 || b.low < 0) return AnyInt();
  int64_t high = std::max(a.high, b.high);  // all bits below the highest one may be set
  for (int shift = 1; shift < 32; shift *= 2) high |= high >> shift;
  return OfInts(op == kOrI ? std::max(a.low, b.low) : 0, high);
}

// ---- floats

Bounds AnyFloat() {
  Bounds x = {};
  x.float_low = -kInf;
  x.float_high = kInf;
  x.may_be_nan = true;
  return x;
}

// Encloses [low, high] and, where denormals may be flushed to 0 or not, both.
Bounds OfFloats(float low, float high, bool may_be_nan = false) {
  if (std::isnan(low) || std::isnan(high)) return AnyFloat();
  Bounds x = {};
  if (std::fabs(low) < kMinNormal) low = low < 0 ? -kMinNormal : 0.0f;
  if (std::fabs(high) < kMinNormal) high = high > 0 ? kMinNormal : 0.0f;
  x.float_low = low;
  x.float_high = high;
  x.may_be_nan = may_be_nan;
  return x;
}

// Outwards by about `ulps` units in the last place.
Bounds OfWidened(float low, float high, int ulps, bool may_be_nan = false) {
  const float step = float(ulps) * std::numeric_limits<float>::epsilon();
  return OfFloats(low - std::fabs(low) * step - kMinNormal, high + std::fabs(high) * step + kMinNormal, may_be_nan);
}

Bounds MultiplyF(const Bounds& a, const Bounds& b) {
  if (!a.is_finite() || !b.is_finite()) return AnyFloat();
  const double al = a.float_low, ah = a.float_high, bl = b.float_low,
               bh = b.float_high;  // exact in double
  const double low = std::min(std::min(al * bl, al * bh), std::min(ah * bl, ah * bh));
  const double high = std::max(std::max(al * bl, al * bh), std::max(ah * bl, ah * bh));
  const float float_low = float(low), float_high = float(high);
  const bool is_exact = float_low == low && float_high == high;
  return is_exact ? OfFloats(float_low, float_high) : OfWidened(float_low, float_high, 2);
}

Bounds DivideF(const Bounds& a, const Bounds& b) {
  if (!a.is_finite() || !b.is_finite() || (b.float_low <= kMinNormal && b.float_high >= -kMinNormal)) {
    return AnyFloat();
  }
  const float quotients[] = {a.float_low / b.float_low, a.float_low / b.float_high, a.float_high / b.float_low,
                             a.float_high / b.float_high};
  return OfWidened(*std::min_element(quotients, quotients + 4), *std::max_element(quotients, quotients + 4), 4);
}

Bounds AddF(const Bounds& a, const Bounds& b, float sign) {
  if (!a.is_finite() || !b.is_finite()) return AnyFloat();
  return sign > 0 ? OfFloats(a.float_low + b.float_low, a.float_high + b.float_high)
                  : OfFloats(a.float_low - b.float_high, a.float_high - b.float_low);
}

float ApplyF(ProgramOp op, float x) {
  Scalar a;
  a.f = x;
  return ComputeScalar(op, a, a, a).f;
}

// A non-decreasing function on the numbers from `domain` on; `ulps` is how far implementations may
// differ.
Bounds Monotone(ProgramOp op, const Bounds& a, int ulps, float domain = -kInf) {
  if (a.may_be_nan || (domain > -kInf && a.float_low <= domain)) return AnyFloat();
  const float low = ApplyF(op, a.float_low), high = ApplyF(op, a.float_high);
  return ulps == 0 ? OfFloats(low, high) : OfWidened(low, high, ulps);
}

Bounds CompareF(ProgramOp op, const Bounds& a, const Bounds& b) {
  const bool nan = a.may_be_nan || b.may_be_nan;
  const float al = a.float_low, ah = a.float_high, bl = b.float_low, bh = b.float_high;
  const bool may_be_equal = al <= bh && bl <= ah, may_differ = nan || !(al == ah && bl == bh && al == bl);
  switch (op) {
    case kLtF: return OfBool(nan || ah >= bl, al < bh);
    case kLeF: return OfBool(nan || ah > bl, al <= bh);
    case kEqF: return OfBool(may_differ, may_be_equal);
    default: return OfBool(may_be_equal, may_differ);
  }
}

// ---- captured arrays

Bounds AnyOfType(ProgramType type) {
  return type == kTypeF32 ? AnyFloat() : type == kTypeI32 ? AnyInt() : OfBool(true, true);
}

template <class Reader>
Bounds ScanRows(const Capture& capture, ProgramType type, const int64_t* first, const int64_t* last) {
  int64_t index[Capture::kMaxRank];
  const int inner = capture.rank - 1;
  int64_t offset = 0;
  for (int d = 0; d < capture.rank; ++d) {
    index[d] = first[d];
    offset += first[d] * capture.strides[d];
  }
  const int64_t count = capture.rank == 0 ? 1 : last[inner] - first[inner] + 1;
  const int64_t step = capture.rank == 0 ? 1 : capture.strides[inner];
  int low = std::numeric_limits<int>::max(), high = std::numeric_limits<int>::min();
  float float_low = kInf, float_high = -kInf;
  bool has_nan = false;
  for (;;) {
    for (int64_t c = 0; c < count; ++c) {
      const int bits = Reader::At(capture.data, offset + c * step);
      if (type == kTypeF32) {
        const float x = FloatOfBits(unsigned(bits));
        float_low = x < float_low ? x : float_low;
        float_high = x > float_high ? x : float_high;
        has_nan |= x != x;
      } else {
        low = bits < low ? bits : low;
        high = bits > high ? bits : high;
      }
    }
    if (type == kTypeBool && low != high) break;  // both seen
    int d = inner - 1;                            // the next row of the box
    for (; d >= 0; --d) {
      offset += capture.strides[d];
      if (++index[d] <= last[d]) break;
      offset -= (last[d] - first[d] + 1) * capture.strides[d];
      index[d] = first[d];
    }
    if (d < 0) break;
  }
  if (type == kTypeF32) return float_low > float_high ? AnyFloat() : OfFloats(float_low, float_high, has_nan);
  return type == kTypeI32 ? OfInts(low, high) : OfBool(high == 0, low != 0);
}

Bounds Load(const Capture& capture, ProgramType type, const int* index_ids, const Bounds* values) {
  int64_t first[Capture::kMaxRank], last[Capture::kMaxRank], elements = 1;
  for (int d = 0; d < capture.rank; ++d) {
    const int64_t size = capture.dims[d];
    const Bounds& index = values[index_ids[d]];
    if (size == 0) return type == kTypeF32 ? OfFloats(0, 0) : type == kTypeI32 ? OfInts(0, 0) : OfBool(true, false);
    first[d] = std::clamp<int64_t>(index.low, 0, size - 1);
    last[d] = std::clamp<int64_t>(index.high, 0, size - 1);
    const int64_t count = last[d] - first[d] + 1;
    if (count > kMaxBoxElements) return AnyOfType(type);
    elements *= count;
    if (elements > kMaxBoxElements) return AnyOfType(type);
  }
  Bounds x = {};
  WithReader(capture.dtype, [&](auto reader) { x = ScanRows<decltype(reader)>(capture, type, first, last); });
  return x;
}

Bounds Constant(ProgramType type, int bits) {
  if (type == kTypeI32) return OfInts(bits, bits);
  if (type == kTypeBool) return OfBool(bits == 0, bits != 0);
  const float x = FloatOfBits(unsigned(bits));
  return OfFloats(x, x);
}

Bounds Index(const Box& box, IndexRange range, int64_t cq, int64_t ck) {
  if (range.first < kIntMin || range.last > kIntMax) return AnyInt();
  return cq == 0 && ck == 0 ? OfInts(range.first, range.last) : OfLinear(box, cq, ck, 0, 0, range.first, range.last);
}

// ---- all operations on values

Bounds Apply(const Box& box, ProgramOp op, ProgramType type, const Bounds& a, const Bounds& b, const Bounds& c) {
  constexpr int kLibraryUlps = 16;  // the row functions are within 7 of the exact value, libm within a few
  switch (op) {
    case kAddI: return Add(box, a, b);
    case kSubI: return Subtract(box, a, b);
    case kMulI: return Multiply(box, a, b);
    case kDivI: return Divide(a, b);
    case kRemI: return Remainder(box, a, b);
    case kMaxI: return Maximum(box, a, b);
    case kMinI: return Negate(box, Maximum(box, Negate(box, a, -1), Negate(box, b, -1)), -1);
    case kNegI: return Negate(box, a, 0);
    case kNotI: return Negate(box, a, -1);
    case kAbsI:
      if (a.low >= 0) return a;
      return a.high <= 0 ? Negate(box, a, 0) : OfInts(0, std::max(-a.low, a.high));
    case kSignI: return OfInts((a.low > 0) - (a.low < 0), (a.high > 0) - (a.high < 0));
    case kAndI:
    case kOrI:
    case kXorI: return Bitwise(op, a, b);
    case kShlI:
      if (!b.is_single()) return AnyInt();
      if (b.low < 0 || b.low > 31) return OfInts(0, 0);
      return b.low == 31 ? AnyInt() : Multiply(box, a, OfInts(int64_t{1} << b.low, int64_t{1} << b.low));
    case kShrAI: return ShiftRight(a, b);
    case kShrLI:
      if (!b.is_single() || a.low < 0) return AnyInt();
      return b.low < 0 || b.low > 31 ? OfInts(0, 0) : ShiftRight(a, b);
    case kEqI:
    case kNeI: {
      const IndexRange d = Difference(box, a, b);
      const bool may_be_equal = d.first <= 0 && d.last >= 0, may_differ = d.first != 0 || d.last != 0;
      return op == kEqI ? OfBool(may_differ, may_be_equal) : OfBool(may_be_equal, may_differ);
    }
    case kLtI: {
      const IndexRange d = Difference(box, a, b);
      return OfBool(d.last >= 0, d.first < 0);
    }
    case kLeI: {
      const IndexRange d = Difference(box, a, b);
      return OfBool(d.last > 0, d.first <= 0);
    }
    case kAndB: return OfBool(a.low == 0 || b.low == 0, a.high != 0 && b.high != 0);
    case kOrB: return OfBool(a.low == 0 && b.low == 0, a.high != 0 || b.high != 0);
    case kXorB:
      if (!a.is_single() || !b.is_single()) return OfBool(true, true);
      return OfBool(a.low == b.low, a.low != b.low);
    case kNotB: return OfBool(a.high != 0, a.low == 0);
    case kSelect:
      if (a.is_single()) return a.low != 0 ? b : c;
      if (type == kTypeI32) return Union(box, b, c);
      if (type == kTypeBool) return OfBool(b.low == 0 || c.low == 0, b.high != 0 || c.high != 0);
      return OfFloats(std::min(b.float_low, c.float_low), std::max(b.float_high, c.float_high),
                      b.may_be_nan || c.may_be_nan);
    case kBoolToI32: return OfInts(a.low, a.high);
    case kBoolToF32: return OfFloats(float(a.low), float(a.high));
    case kI32ToF32: return OfFloats(float(a.low), float(a.high));
    case kF32ToI32: {
      if (a.may_be_nan) return AnyInt();
      Scalar low, high;
      low.f = a.float_low;
      high.f = a.float_high;
      return OfInts(ComputeScalar(kF32ToI32, low, low, low).i, ComputeScalar(kF32ToI32, high, high, high).i);
    }
    case kAddF: return AddF(a, b, 1);
    case kSubF: return AddF(a, b, -1);
    case kMulF: return MultiplyF(a, b);
    case kFmaF: return AddF(MultiplyF(a, b), c, 1);
    case kDivF: return DivideF(a, b);
    case kMaxF:
      return OfFloats(std::max(a.float_low, b.float_low), std::max(a.float_high, b.float_high),
                      a.may_be_nan || b.may_be_nan);
    case kMinF:
      return OfFloats(std::min(a.float_low, b.float_low), std::min(a.float_high, b.float_high),
                      a.may_be_nan || b.may_be_nan);
    case kNegF: return OfFloats(-a.float_high, -a.float_low, a.may_be_nan);
    case kAbsF: {
      const float larger = std::max(std::fabs(a.float_low), std::fabs(a.float_high));
      const float smaller = std::min(std::fabs(a.float_low), std::fabs(a.float_high));
      return OfFloats(a.float_low <= 0 && a.float_high >= 0 ? 0.0f : smaller, larger, a.may_be_nan);
    }
    case kIsFiniteF: return OfBool(!a.is_finite(), true);
    case kEqF:
    case kNeF:
    case kLtF:
    case kLeF: return CompareF(op, a, b);
    case kFloorF:
    case kCeilF:
    case kRoundEvenF:
    case kRoundAwayF:
    case kRoundBf16:
    case kRoundF16: return Monotone(op, a, 0);
    case kExpF:
    case kExp2F:
    case kExpm1F:
    case kTanhF:
    case kErfF: return Monotone(op, a, kLibraryUlps);
    case kSqrtF:
    case kLogF: return Monotone(op, a, kLibraryUlps, 0.0f);
    case kLog1pF: return Monotone(op, a, kLibraryUlps, -1.0f);
    default: return AnyOfType(type);
  }
}

}  // namespace

Liveness Program::Classify(const Capture* captures, IndexRange b, IndexRange h, IndexRange q, IndexRange kv) const {
  if (result_ < 0 || values_[result_].type != kTypeBool) return Liveness::kMixed;
  for (const IndexRange range : {b, h, q, kv}) {
    if (range.first > range.last) return Liveness::kNone;  // no element at all
  }
  // Typical programs fit on the stack: this runs once per tile and must not allocate.
  constexpr int kStackValues = 64;
  Bounds on_stack[kStackValues];
  std::vector<Bounds> on_heap;
  Bounds* values = on_stack;
  const int num_values = result_ + 1;
  if (num_values > kStackValues) {
    on_heap.resize(num_values);
    values = on_heap.data();
  }
  const Box box = {q, kv};
  for (int id = 0; id < num_values; ++id) {
    const Value& value = values_[id];
    switch (value.op) {
      case kConst: values[id] = Constant(value.type, value.imm); break;
      case kInput:
        values[id] = value.a == kInputB   ? Index(box, b, 0, 0)
                     : value.a == kInputH ? Index(box, h, 0, 0)
                     : value.a == kInputQ ? Index(box, q, 1, 0)
                                          : Index(box, kv, 0, 1);
        break;
      case kLoad: values[id] = Load(captures[value.a], value.type, extra_.data() + value.b, values); break;
      default:
        values[id] =
            Apply(box, value.op, value.type, values[value.a], values[value.num_operands >= 2 ? value.b : value.a],
                  values[value.num_operands >= 3 ? value.c : value.a]);
    }
  }
  const Bounds& result = values[result_];
  return result.high == 0 ? Liveness::kNone : result.low != 0 ? Liveness::kAll : Liveness::kMixed;
}

}  // namespace fkl
