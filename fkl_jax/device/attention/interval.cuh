// Interval arithmetic over a tile: can a mask program be false, can it be true, somewhere in a box
// of indices?
//
// Every value of the program gets an enclosure of all that it can be in the box. An int32 value is
// also kept in the form cq * q + ck * kv + r with r in an interval, so that q - kv, and kv - q + q,
// stay exact. Nearly all coefficients are constants of the program, so little of this is left after
// compilation. Whatever is not worth its code is "anything". Floats must also enclose what the
// compiler makes of the program: it fuses products into sums, and functions differ in the last
// places.
#ifndef FKL_DEVICE_ATTENTION_INTERVAL_CUH_
#define FKL_DEVICE_ATTENTION_INTERVAL_CUH_

#include "attention/mods.cuh"

namespace fkl {

constexpr long long kIntMin = -2147483648ll, kIntMax = 2147483647ll;
constexpr float kMinNormal = 1.17549435e-38f;
constexpr int kMaxBoxElements =
    256;  // of a captured array, read by one lane for their minimum and maximum
constexpr int kLibraryUlps = 16;  // functions are within a few of the exact value

FKL_DEVICE float positive_infinity() { return __int_as_float(0x7f800000); }

FKL_DEVICE long long min_i64(long long a, long long b) { return a < b ? a : b; }
FKL_DEVICE long long max_i64(long long a, long long b) { return a > b ? a : b; }

struct Box {
  long long q_first, q_last, kv_first, kv_last;
};

struct BoolBounds {
  bool may_be_false, may_be_true;

  FKL_DEVICE int tile_state() const {
    return !may_be_true ? kTileDead : may_be_false ? kTileMixed : kTileLive;
  }
};

struct IntBounds {
  long long low, high;
  long long cq, ck, rest_low, rest_high;

  FKL_DEVICE bool is_single() const { return low == high; }
};

struct FloatBounds {
  float low, high;
  bool may_be_nan;

  FKL_DEVICE bool is_finite() const {
    return !may_be_nan && low > -positive_infinity() && high < positive_infinity();
  }
};

// ---- bools

FKL_DEVICE BoolBounds any_bool() { return {true, true}; }
FKL_DEVICE BoolBounds bounds_of(bool x) { return {!x, x}; }
FKL_DEVICE BoolBounds interval_and(BoolBounds a, BoolBounds b) {
  return {a.may_be_false || b.may_be_false, a.may_be_true && b.may_be_true};
}
FKL_DEVICE BoolBounds interval_or(BoolBounds a, BoolBounds b) {
  return {a.may_be_false && b.may_be_false, a.may_be_true || b.may_be_true};
}
FKL_DEVICE BoolBounds interval_not(BoolBounds a) { return {a.may_be_true, a.may_be_false}; }
FKL_DEVICE BoolBounds interval_xor(BoolBounds a, BoolBounds b) {
  return {(a.may_be_false && b.may_be_false) || (a.may_be_true && b.may_be_true),
          (a.may_be_false && b.may_be_true) || (a.may_be_true && b.may_be_false)};
}

// ---- integers

FKL_DEVICE IntBounds int_range(long long low, long long high) {
  const bool wraps = low < kIntMin || high > kIntMax;
  low = wraps ? kIntMin : low;
  high = wraps ? kIntMax : high;
  return {low, high, 0, 0, low, high};
}
FKL_DEVICE IntBounds any_int() { return int_range(kIntMin, kIntMax); }
FKL_DEVICE IntBounds bounds_of(int x) { return int_range(x, x); }

// The extremes of cq * q + ck * kv + [rest].
FKL_DEVICE long long lowest(const Box& box, long long cq, long long ck, long long rest) {
  return cq * (cq >= 0 ? box.q_first : box.q_last) + ck * (ck >= 0 ? box.kv_first : box.kv_last) +
         rest;
}
FKL_DEVICE long long highest(const Box& box, long long cq, long long ck, long long rest) {
  return cq * (cq >= 0 ? box.q_last : box.q_first) + ck * (ck >= 0 ? box.kv_last : box.kv_first) +
         rest;
}

// A value known in both ways, [low, high] and the linear form.
FKL_DEVICE IntBounds linear(const Box& box, long long cq, long long ck, long long rest_low,
                            long long rest_high, long long low, long long high) {
  constexpr long long kMaxCoefficient = 1ll << 24, kMaxRest = 1ll << 56;
  if (cq < -kMaxCoefficient || cq > kMaxCoefficient || ck < -kMaxCoefficient ||
      ck > kMaxCoefficient || rest_low < -kMaxRest || rest_high > kMaxRest) {
    return int_range(low, high);
  }
  low = max_i64(low, lowest(box, cq, ck, rest_low));
  high = min_i64(high, highest(box, cq, ck, rest_high));
  if (low < kIntMin || high > kIntMax) return any_int();  // may wrap, then nothing linear is left
  if (cq == 0 && ck == 0) return int_range(low, high);
  return {low, high, cq, ck, rest_low, rest_high};
}

FKL_DEVICE IntBounds interval_q(const Box& box) { return {box.q_first, box.q_last, 1, 0, 0, 0}; }
FKL_DEVICE IntBounds interval_kv(const Box& box) { return {box.kv_first, box.kv_last, 0, 1, 0, 0}; }

FKL_DEVICE IntBounds interval_add(const Box& box, const IntBounds& a, const IntBounds& b) {
  return linear(box, a.cq + b.cq, a.ck + b.ck, a.rest_low + b.rest_low, a.rest_high + b.rest_high,
                a.low + b.low, a.high + b.high);
}
FKL_DEVICE IntBounds interval_sub(const Box& box, const IntBounds& a, const IntBounds& b) {
  return linear(box, a.cq - b.cq, a.ck - b.ck, a.rest_low - b.rest_high, a.rest_high - b.rest_low,
                a.low - b.high, a.high - b.low);
}
// shift - x, for shift 0 or -1.
FKL_DEVICE IntBounds negate(const Box& box, const IntBounds& a, int shift) {
  return linear(box, -a.cq, -a.ck, shift - a.rest_high, shift - a.rest_low, shift - a.high,
                shift - a.low);
}
FKL_DEVICE IntBounds interval_neg(const Box& box, const IntBounds& a) { return negate(box, a, 0); }
FKL_DEVICE IntBounds interval_not(const Box& box, const IntBounds& a) { return negate(box, a, -1); }

// The exact extremes of a - b, without wrapping.
FKL_DEVICE long long lowest_difference(const Box& box, const IntBounds& a, const IntBounds& b) {
  return max_i64(lowest(box, a.cq - b.cq, a.ck - b.ck, a.rest_low - b.rest_high), a.low - b.high);
}
FKL_DEVICE long long highest_difference(const Box& box, const IntBounds& a, const IntBounds& b) {
  return min_i64(highest(box, a.cq - b.cq, a.ck - b.ck, a.rest_high - b.rest_low), a.high - b.low);
}

FKL_DEVICE IntBounds interval_mul(const Box& box, IntBounds a, IntBounds b) {
  constexpr long long kMaxFactor = 1ll << 31, kMaxRest = 1ll << 32;
  if (a.is_single() && !b.is_single()) {
    const IntBounds c = a;
    a = b;
    b = c;
  }
  const long long ll = a.low * b.low, lh = a.low * b.high, hl = a.high * b.low,
                  hh = a.high * b.high;
  const long long low = min_i64(min_i64(ll, lh), min_i64(hl, hh)),
                  high = max_i64(max_i64(ll, lh), max_i64(hl, hh));
  if (!b.is_single() || b.low < -kMaxFactor || b.low > kMaxFactor || a.rest_low < -kMaxRest ||
      a.rest_high > kMaxRest) {
    return int_range(low, high);
  }
  // At most 2^56 x 2^31 in a coefficient would overflow, but coefficients are below 2^25.
  const long long first = a.rest_low * b.low, second = a.rest_high * b.low;
  return linear(box, a.cq * b.low, a.ck * b.low, min_i64(first, second), max_i64(first, second),
                low, high);
}

FKL_DEVICE IntBounds interval_union(const Box& box, const IntBounds& a, const IntBounds& b) {
  const long long low = min_i64(a.low, b.low), high = max_i64(a.high, b.high);
  if (a.cq != b.cq || a.ck != b.ck) return int_range(low, high);
  return linear(box, a.cq, a.ck, min_i64(a.rest_low, b.rest_low), max_i64(a.rest_high, b.rest_high),
                low, high);
}

FKL_DEVICE IntBounds interval_max(const Box& box, const IntBounds& a, const IntBounds& b) {
  if (lowest_difference(box, a, b) >= 0) return a;
  if (highest_difference(box, a, b) <= 0) return b;
  const IntBounds x = interval_union(box, a, b);
  const long long low = max_i64(a.low, b.low);
  return x.low < low ? linear(box, x.cq, x.ck, x.rest_low, x.rest_high, low, x.high) : x;
}
FKL_DEVICE IntBounds interval_min(const Box& box, const IntBounds& a, const IntBounds& b) {
  return negate(box, interval_max(box, negate(box, a, -1), negate(box, b, -1)), -1);
}

FKL_DEVICE IntBounds interval_div(const Box&, const IntBounds& a,
                                  const IntBounds& b) {  // monotone: positive divisor
  if (!b.is_single() || b.low < 0) return any_int();
  return b.low == 0 ? int_range(-1, -1) : int_range(a.low / b.low, a.high / b.low);
}
FKL_DEVICE IntBounds interval_rem(const Box& box, const IntBounds& a, const IntBounds& b) {
  if (!b.is_single()) return any_int();
  if (b.low == 0) return a;
  const long long divisor = b.low < 0 ? -b.low : b.low;
  const long long quotient = a.low / divisor;
  if (quotient == a.high / divisor) {  // the same multiple is taken away everywhere: still linear
    return interval_sub(box, a, int_range(quotient * divisor, quotient * divisor));
  }
  return int_range(a.low < 0 ? max_i64(a.low, 1 - divisor) : 0,
                   a.high > 0 ? min_i64(a.high, divisor - 1) : 0);
}
FKL_DEVICE IntBounds interval_abs(const Box& box, const IntBounds& a) {
  if (a.low >= 0) return a;
  return a.high <= 0 ? negate(box, a, 0) : int_range(0, max_i64(-a.low, a.high));
}
FKL_DEVICE IntBounds interval_sign(const Box&, const IntBounds& a) {
  return int_range((a.low > 0) - (a.low < 0), (a.high > 0) - (a.high < 0));
}
FKL_DEVICE IntBounds interval_and(const Box&, const IntBounds& a, const IntBounds& b) {
  if (a.low >= 0) return int_range(0, b.low >= 0 ? min_i64(a.high, b.high) : a.high);
  return b.low >= 0 ? int_range(0, b.high) : any_int();
}
FKL_DEVICE long long ones_up_to(long long x) {  // all bits below the highest one may be set
  for (int shift = 1; shift < 32; shift *= 2) x |= x >> shift;
  return x;
}
FKL_DEVICE IntBounds interval_or(const Box&, const IntBounds& a, const IntBounds& b) {
  if (a.low < 0 || b.low < 0) return any_int();
  return int_range(max_i64(a.low, b.low), ones_up_to(max_i64(a.high, b.high)));
}
FKL_DEVICE IntBounds interval_xor(const Box&, const IntBounds& a, const IntBounds& b) {
  if (a.low < 0 || b.low < 0) return any_int();
  return int_range(0, ones_up_to(max_i64(a.high, b.high)));
}
FKL_DEVICE IntBounds interval_shl(const Box& box, const IntBounds& a, const IntBounds& b) {
  if (!b.is_single()) return any_int();
  if (b.low < 0 || b.low > 31) return int_range(0, 0);
  if (b.low == 31) return any_int();
  const long long factor = 1ll << b.low;
  return interval_mul(box, a, int_range(factor, factor));
}
FKL_DEVICE IntBounds interval_shra(const Box&, const IntBounds& a, const IntBounds& b) {
  if (!b.is_single()) return any_int();
  const int shift = b.low < 0 || b.low > 31 ? 31 : static_cast<int>(b.low);
  return int_range(a.low >> shift, a.high >> shift);
}
FKL_DEVICE IntBounds interval_shrl(const Box& box, const IntBounds& a, const IntBounds& b) {
  if (!b.is_single() || a.low < 0) return any_int();
  return b.low < 0 || b.low > 31 ? int_range(0, 0) : interval_shra(box, a, b);
}

FKL_DEVICE BoolBounds interval_eq(const Box& box, const IntBounds& a, const IntBounds& b) {
  const long long low = lowest_difference(box, a, b), high = highest_difference(box, a, b);
  return {low != 0 || high != 0, low <= 0 && high >= 0};
}
FKL_DEVICE BoolBounds interval_ne(const Box& box, const IntBounds& a, const IntBounds& b) {
  return interval_not(interval_eq(box, a, b));
}
FKL_DEVICE BoolBounds interval_lt(const Box& box, const IntBounds& a, const IntBounds& b) {
  return {highest_difference(box, a, b) >= 0, lowest_difference(box, a, b) < 0};
}
FKL_DEVICE BoolBounds interval_le(const Box& box, const IntBounds& a, const IntBounds& b) {
  return {highest_difference(box, a, b) > 0, lowest_difference(box, a, b) <= 0};
}

// ---- floats

FKL_DEVICE FloatBounds any_float() { return {-positive_infinity(), positive_infinity(), true}; }

// Encloses [low, high] and, where denormals may be flushed to 0 or not, both.
FKL_DEVICE FloatBounds float_range(float low, float high, bool may_be_nan = false) {
  if (is_nan(low) || is_nan(high)) return any_float();
  if (fabsf(low) < kMinNormal) low = low < 0.0f ? -kMinNormal : 0.0f;
  if (fabsf(high) < kMinNormal) high = high > 0.0f ? kMinNormal : 0.0f;
  return {low, high, may_be_nan};
}
// Outwards by about `ulps` units in the last place.
FKL_DEVICE FloatBounds widened(float low, float high, int ulps, bool may_be_nan = false) {
  const float step = static_cast<float>(ulps) * 1.1920929e-7f;
  return float_range(low - fabsf(low) * step - kMinNormal, high + fabsf(high) * step + kMinNormal,
                     may_be_nan);
}
FKL_DEVICE FloatBounds bounds_of(float x) { return float_range(x, x); }

FKL_DEVICE float lower(float a, float b) { return a < b ? a : b; }
FKL_DEVICE float higher(float a, float b) { return a > b ? a : b; }

FKL_DEVICE FloatBounds interval_add(const FloatBounds& a, const FloatBounds& b) {
  return a.is_finite() && b.is_finite() ? float_range(a.low + b.low, a.high + b.high) : any_float();
}
FKL_DEVICE FloatBounds interval_sub(const FloatBounds& a, const FloatBounds& b) {
  return a.is_finite() && b.is_finite() ? float_range(a.low - b.high, a.high - b.low) : any_float();
}
FKL_DEVICE FloatBounds interval_mul(const FloatBounds& a, const FloatBounds& b) {
  if (!a.is_finite() || !b.is_finite()) return any_float();
  // Exact in double.
  const double ll = double(a.low) * b.low, lh = double(a.low) * b.high, hl = double(a.high) * b.low,
               hh = double(a.high) * b.high;
  double low = ll < lh ? ll : lh, high = ll < lh ? lh : ll;
  low = hl < low ? hl : low;
  low = hh < low ? hh : low;
  high = hl > high ? hl : high;
  high = hh > high ? hh : high;
  const float float_low = static_cast<float>(low), float_high = static_cast<float>(high);
  const bool is_exact = float_low == low && float_high == high;
  return is_exact ? float_range(float_low, float_high) : widened(float_low, float_high, 2);
}
FKL_DEVICE FloatBounds interval_fma(const FloatBounds& a, const FloatBounds& b,
                                    const FloatBounds& c) {
  return interval_add(interval_mul(a, b), c);
}
FKL_DEVICE FloatBounds interval_div(const FloatBounds& a, const FloatBounds& b) {
  if (!a.is_finite() || !b.is_finite() || (b.low <= kMinNormal && b.high >= -kMinNormal))
    return any_float();
  const float ll = div_f32(a.low, b.low), lh = div_f32(a.low, b.high), hl = div_f32(a.high, b.low),
              hh = div_f32(a.high, b.high);
  return widened(lower(lower(ll, lh), lower(hl, hh)), higher(higher(ll, lh), higher(hl, hh)), 4);
}
FKL_DEVICE FloatBounds interval_max(const FloatBounds& a, const FloatBounds& b) {
  return float_range(higher(a.low, b.low), higher(a.high, b.high), a.may_be_nan || b.may_be_nan);
}
FKL_DEVICE FloatBounds interval_min(const FloatBounds& a, const FloatBounds& b) {
  return float_range(lower(a.low, b.low), lower(a.high, b.high), a.may_be_nan || b.may_be_nan);
}
FKL_DEVICE FloatBounds interval_neg(const FloatBounds& a) {
  return float_range(-a.high, -a.low, a.may_be_nan);
}
FKL_DEVICE FloatBounds interval_abs(const FloatBounds& a) {
  const float low = fabsf(a.low), high = fabsf(a.high);
  const bool has_zero = a.low <= 0.0f && a.high >= 0.0f;
  return float_range(has_zero ? 0.0f : lower(low, high), higher(low, high), a.may_be_nan);
}

// A non-decreasing function on the numbers above `domain`; `ulps` is how far implementations may
// differ.
template <class Function>
FKL_DEVICE FloatBounds monotone(const FloatBounds& a, int ulps, float domain, Function function) {
  if (a.may_be_nan || !(a.low > domain || domain == -positive_infinity())) return any_float();
  const float low = function(a.low), high = function(a.high);
  return ulps == 0 ? float_range(low, high) : widened(low, high, ulps);
}

FKL_DEVICE BoolBounds interval_eq(const FloatBounds& a, const FloatBounds& b) {
  const bool has_nan = a.may_be_nan || b.may_be_nan;
  return {has_nan || !(a.low == a.high && b.low == b.high && a.low == b.low),
          a.low <= b.high && b.low <= a.high};
}
FKL_DEVICE BoolBounds interval_ne(const FloatBounds& a, const FloatBounds& b) {
  return interval_not(interval_eq(a, b));
}
FKL_DEVICE BoolBounds interval_lt(const FloatBounds& a, const FloatBounds& b) {
  return {a.may_be_nan || b.may_be_nan || a.high >= b.low, a.low < b.high};
}
FKL_DEVICE BoolBounds interval_le(const FloatBounds& a, const FloatBounds& b) {
  return {a.may_be_nan || b.may_be_nan || a.high > b.low, a.low <= b.high};
}
FKL_DEVICE BoolBounds interval_is_finite(const FloatBounds& a) { return {!a.is_finite(), true}; }

// ---- between types

FKL_DEVICE BoolBounds interval_select(const Box&, BoolBounds c, BoolBounds a, BoolBounds b) {
  if (!c.may_be_false) return a;
  if (!c.may_be_true) return b;
  return {a.may_be_false || b.may_be_false, a.may_be_true || b.may_be_true};
}
FKL_DEVICE IntBounds interval_select(const Box& box, BoolBounds c, const IntBounds& a,
                                     const IntBounds& b) {
  if (!c.may_be_false) return a;
  return c.may_be_true ? interval_union(box, a, b) : b;
}
FKL_DEVICE FloatBounds interval_select(const Box&, BoolBounds c, const FloatBounds& a,
                                       const FloatBounds& b) {
  if (!c.may_be_false) return a;
  if (!c.may_be_true) return b;
  return float_range(lower(a.low, b.low), higher(a.high, b.high), a.may_be_nan || b.may_be_nan);
}
FKL_DEVICE IntBounds interval_i32_of(BoolBounds a) {
  return int_range(!a.may_be_false, a.may_be_true);
}
FKL_DEVICE FloatBounds interval_f32_of(BoolBounds a) {
  return float_range(a.may_be_false ? 0.0f : 1.0f, a.may_be_true ? 1.0f : 0.0f);
}
FKL_DEVICE FloatBounds interval_f32_of(const IntBounds& a) {
  return float_range(static_cast<float>(a.low), static_cast<float>(a.high));
}
FKL_DEVICE IntBounds interval_i32_of(const FloatBounds& a) {
  return a.may_be_nan ? any_int() : int_range(f32_to_i32(a.low), f32_to_i32(a.high));
}

// ---- captured arrays

// What one lane finds among the elements it reads.
struct FoundInts {
  long long low = kIntMax, high = kIntMin;
  FKL_DEVICE bool add(int x) {
    low = min_i64(low, x);
    high = max_i64(high, x);
    return false;
  }
  FKL_DEVICE IntBounds bounds() const { return int_range(low, high); }
  static FKL_DEVICE IntBounds any() { return any_int(); }
};
struct FoundFloats {
  float low = positive_infinity(), high = -positive_infinity();
  bool has_nan = false;
  FKL_DEVICE bool add(float x) {
    low = lower(x, low);
    high = higher(x, high);
    has_nan |= is_nan(x);
    return false;
  }
  FKL_DEVICE FloatBounds bounds() const {
    return low > high ? any_float() : float_range(low, high, has_nan);
  }
  static FKL_DEVICE FloatBounds any() { return any_float(); }
};
struct FoundBools {
  BoolBounds seen{false, false};
  FKL_DEVICE bool add(bool x) {
    seen.may_be_true |= x;
    seen.may_be_false |= !x;
    return seen.may_be_true && seen.may_be_false;  // more cannot be learnt
  }
  FKL_DEVICE BoolBounds bounds() const { return seen; }
  static FKL_DEVICE BoolBounds any() { return any_bool(); }
};

template <class Element>
struct FoundOf {
  using Type = FoundInts;
};
template <>
struct FoundOf<float> {
  using Type = FoundFloats;
};
template <>
struct FoundOf<bool> {
  using Type = FoundBools;
};

// The elements of a row-major array of sizes kSizes, all positive, with each index in its interval.
template <int... kSizes, class Element, class... Indices>
FKL_DEVICE auto interval_load(const Element* data, const Indices&... indices) {
  using Found = typename FoundOf<decltype(read_element(data))>::Type;
  constexpr int kRank = sizeof...(kSizes);
  constexpr int kDims[kRank == 0 ? 1 : kRank] = {kSizes...};
  const IntBounds index[kRank == 0 ? 1 : kRank] = {indices...};
  long long offset = 0, count = 1;
  int first[kRank == 0 ? 1 : kRank] = {}, last[kRank == 0 ? 1 : kRank] = {};
#pragma unroll
  for (int d = 0; d < kRank; ++d) {
    first[d] = clamp_index(static_cast<int>(index[d].low), kDims[d]);
    last[d] = clamp_index(static_cast<int>(index[d].high), kDims[d]);
    offset = offset * kDims[d] + first[d];
    // Saves the product from overflow: once too many, always too many.
    if (count <= kMaxBoxElements) count *= last[d] - first[d] + 1;
  }
  if (count > kMaxBoxElements) return Found::any();
  Found found;
  int at[kRank == 0 ? 1 : kRank];
#pragma unroll
  for (int d = 0; d < kRank; ++d) at[d] = first[d];
  for (int k = 0; k < count; ++k) {
    if (found.add(read_element(data + offset))) break;
    long long stride = 1;
    bool carry = true;
#pragma unroll
    for (int d = kRank - 1; d >= 0; --d) {
      if (carry) {
        carry = at[d] == last[d];
        offset += carry ? -stride * (last[d] - first[d]) : stride;
        at[d] = carry ? first[d] : at[d] + 1;
      }
      stride *= kDims[d];
    }
  }
  return found.bounds();
}

}  // namespace fkl

#endif  // FKL_DEVICE_ATTENTION_INTERVAL_CUH_
