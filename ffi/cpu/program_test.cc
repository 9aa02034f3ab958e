// Unit test of programs: decoding, rows, loads and their gradients, intervals. No framework: exits
// with 1 if a check fails.
//
//   program_test            all checks, for every instruction set that this CPU has
//   program_test --bench    times per score, of decoding and of classifying
#include "cpu/program.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "cpu/isa_select.h"
#include "cpu/scalar_ops.h"

namespace fkl {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int kIntMin = std::numeric_limits<int32_t>::min();
constexpr int kIntMax = std::numeric_limits<int32_t>::max();

int num_failures = 0;

#define CHECK(condition, ...)                                              \
  do {                                                                     \
    if (!(condition)) {                                                    \
      if (++num_failures <= 20) {                                          \
        std::printf("%s:%d: %s failed: ", __FILE__, __LINE__, #condition); \
        std::printf(__VA_ARGS__);                                          \
        std::printf("\n");                                                 \
      }                                                                    \
    }                                                                      \
  } while (false)

const char* OpName(int op) {
  static const char* const kNames[] = {
#define FKL_X(identifier, name) name,
      FKL_PROGRAM_OPS(FKL_X)
#undef FKL_X
  };
  return kNames[op];
}

float AsFloat(int bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
int AsBits(float x) {
  int bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

std::vector<IsaKernels> AllIsas() {
  std::vector<IsaKernels> tables;
  for (const IsaKernels* kernels : SupportedIsas()) tables.push_back(*kernels);
  return tables;
}

// ---- writing programs
// ----------------------------------------------------------------------------------------------

// Types of the operands of an operation and of its result, written down a second time so that the
// test is independent.
struct OpInfo {
  std::string operands;  // one letter each: f, i, b
  char result;
};

OpInfo InfoOf(int op) {
  const std::string name = OpName(op);
  if (name == "select") return {"b??", '?'};
  if (name == "fma.f32") return {"fff", 'f'};
  if (name == "i32_to_f32" || name == "bits_i32_to_f32") return {"i", 'f'};
  if (name == "f32_to_i32" || name == "bits_f32_to_i32") return {"f", 'i'};
  if (name == "bool_to_f32") return {"b", 'f'};
  if (name == "bool_to_i32") return {"b", 'i'};
  const std::string stem = name.substr(0, name.find('.'));
  const char type = name[name.find('.') + 1];
  static const char* const kBinary[] = {"add",   "sub", "mul", "div", "rem", "max",  "min", "pow",
                                        "atan2", "and", "or",  "xor", "shl", "shra", "shrl"};
  for (const char* binary : kBinary) {
    if (stem == binary) return {std::string(2, type), type};
  }
  if (stem == "eq" || stem == "ne" || stem == "lt" || stem == "le") return {std::string(2, type), 'b'};
  if (stem == "is_finite") return {"f", 'b'};
  return {std::string(1, type), type};
}

int TypeNumber(char letter) { return letter == 'f' ? kTypeF32 : letter == 'i' ? kTypeI32 : kTypeBool; }

// Writes bytecode as the compiler does: stages from the operands, registers by liveness.
class Writer {
 public:
  explicit Writer(bool reuse_registers = true) : reuse_registers_(reuse_registers) {}

  int Const(float x) { return Push({kConst, kTypeF32, kStageHead, 0, 0, 0, 0, AsBits(x)}); }
  int ConstI(int x) { return Push({kConst, kTypeI32, kStageHead, 0, 0, 0, 0, x}); }
  int ConstB(bool x) { return Push({kConst, kTypeBool, kStageHead, 0, 0, 0, 0, x ? -1 : 0}); }
  int Input(ProgramInput input) {
    static constexpr int kStages[] = {2, 0, 0, 1, 2, 3};
    const bool is_float = input == kInputScore || input == kInputCt;
    return Push({kInput, is_float ? kTypeF32 : kTypeI32, kStages[input], 0, input, 0, 0, 0});
  }
  int Load(int capture, char type, std::vector<int> indices, bool unit_stride = false) {
    int stage = 0;
    for (const int x : indices) stage = std::max(stage, records_[x][2]);
    const int position = int(extra_.size());
    extra_.insert(extra_.end(), indices.begin(), indices.end());
    return Push({kLoad, TypeNumber(type), stage, 0, capture, position, int(indices.size()), unit_stride ? 1 : 0});
  }
  int Op(int op, int a, int b = 0, int c = 0) {
    const OpInfo info = InfoOf(op);
    const int operands[] = {a, b, c};
    int stage = 0;
    for (size_t k = 0; k < info.operands.size(); ++k) stage = std::max(stage, records_[operands[k]][2]);
    return Push({op, info.result == '?' ? records_[b][1] : TypeNumber(info.result), stage, 0, a, b, c, 0});
  }
  int type(int id) const { return records_[id][1]; }
  int stage(int id) const { return records_[id][2]; }
  int size() const { return int(records_.size()); }

  std::vector<int32_t> Finish(int result, int dscore = -1, std::vector<std::pair<int, int>> load_grads = {}) {
    const int num_registers = AllocateRegisters(result, dscore, load_grads);
    std::vector<int32_t> code = {1, size(), num_registers, result, dscore, int(load_grads.size()), int(extra_.size())};
    for (const auto& [load, grad] : load_grads) {
      code.push_back(load);
      code.push_back(grad);
    }
    for (auto record : records_) {
      if (record[0] == kLoad) record[6] = 0;
      code.insert(code.end(), record.begin(), record.end());
    }
    code.insert(code.end(), extra_.begin(), extra_.end());
    return code;
  }

 private:
  using Record = std::array<int32_t, 8>;

  int Push(Record record) {
    records_.push_back(record);
    return size() - 1;
  }

  std::vector<int> OperandsOf(const Record& r) const {
    if (r[0] == kConst || r[0] == kInput) return {};
    if (r[0] == kLoad) return std::vector<int>(extra_.begin() + r[5], extra_.begin() + r[5] + r[6]);
    std::vector<int> operands = {r[4], r[5], r[6]};
    operands.resize(InfoOf(r[0]).operands.size());
    return operands;
  }

  int AllocateRegisters(int result, int dscore, const std::vector<std::pair<int, int>>& load_grads) {
    std::vector<int> order;
    for (const int stage : {2, 3}) {
      for (int id = 0; id < size(); ++id) {
        if (records_[id][2] == stage) order.push_back(id);
      }
    }
    std::vector<int> last_use(size(), -1);
    for (int k = 0; k < int(order.size()); ++k) {
      last_use[order[k]] = std::max(last_use[order[k]], k);
      for (const int x : OperandsOf(records_[order[k]])) last_use[x] = k;
    }
    const int end = int(order.size());
    last_use[result] = end;
    if (dscore >= 0) last_use[dscore] = end;
    for (const auto& [load, grad] : load_grads) {
      last_use[grad] = end;
      for (const int x : OperandsOf(records_[load])) last_use[x] = end;
    }
    int num_registers = 0;
    std::vector<int> free_registers;
    std::vector<bool> is_free(order.size());
    for (int k = 0; k < int(order.size()); ++k) {
      for (int j = 0; j < k && reuse_registers_; ++j) {  // what is read here for the last time may be written over
        if (last_use[order[j]] > k || is_free[j]) continue;
        free_registers.push_back(records_[order[j]][3]);
        is_free[j] = true;
      }
      if (free_registers.empty()) {
        records_[order[k]][3] = num_registers++;
      } else {
        records_[order[k]][3] = free_registers.back();
        free_registers.pop_back();
      }
    }
    return num_registers;
  }

  bool reuse_registers_;
  std::vector<Record> records_;
  std::vector<int> extra_;
};

Capture MakeCapture(const void* data, DType dtype, std::vector<long long> dims) {
  Capture capture = {};
  capture.data = data;
  capture.dtype = dtype;
  capture.rank = int(dims.size());
  long long stride = 1;
  for (int d = capture.rank - 1; d >= 0; --d) {
    capture.dims[d] = dims[d];
    capture.strides[d] = stride;
    stride *= dims[d];
  }
  return capture;
}

Program Decoded(const std::vector<int32_t>& code, const std::vector<Capture>& captures) {
  Program program;
  const std::string error = program.Decode(code.data(), int64_t(code.size()), captures.data(), int(captures.size()));
  CHECK(error.empty(), "%s", error.c_str());
  return program;
}

struct alignas(64) Row {
  float lanes[kRowWidth];
};

// ---- each operation, in each form
// ----------------------------------------------------------------------------------

int Wrap(int64_t x) { return int(uint32_t(uint64_t(x))); }

// The operation on scalars, plainly; floats in double precision.
double ReferenceF(int op, float a, float b, float c) {
  switch (op) {
    case kAddF: return a + b;
    case kSubF: return a - b;
    case kMulF: return a * b;
    case kDivF: return a / b;
    case kRemF: return std::fmod(a, b);
    case kMaxF: return std::isnan(a) || std::isnan(b) ? kNan : std::max(a, b);
    case kMinF: return std::isnan(a) || std::isnan(b) ? kNan : std::min(a, b);
    case kPowF: return std::pow(double(a), double(b));
    case kAtan2F: return std::atan2(double(a), double(b));
    case kFmaF: return double(a) * double(b) + double(c);
    case kNegF: return -a;
    case kAbsF: return std::fabs(a);
    case kSignF: return a > 0 ? 1.0 : a < 0 ? -1.0 : double(a);
    case kSqrtF: return std::sqrt(double(a));
    case kRsqrtF: return 1 / std::sqrt(double(a));
    case kExpF: return std::exp(double(a));
    case kExp2F: return std::exp2(double(a));
    case kExpm1F: return std::expm1(double(a));
    case kLogF: return std::log(double(a));
    case kLog1pF: return std::log1p(double(a));
    case kTanhF: return std::tanh(double(a));
    case kSinF: return std::sin(double(a));
    case kCosF: return std::cos(double(a));
    case kTanF: return std::tan(double(a));
    case kErfF: return std::erf(double(a));
    case kFloorF: return std::floor(a);
    case kCeilF: return std::ceil(a);
    case kRoundEvenF: return std::nearbyint(a);
    case kRoundAwayF: return std::round(a);
    case kRoundBf16: {
      if (!std::isfinite(a) || a == 0) return a;
      const int exponent = std::max(std::ilogb(a), -126) - 7;
      return float(std::ldexp(std::nearbyint(std::ldexp(double(a), -exponent)), exponent));
    }
    case kRoundF16: {
      if (!std::isfinite(a) || a == 0) return a;
      const int exponent = std::max(std::ilogb(a), -14) - 10;
      const double y = std::ldexp(std::nearbyint(std::ldexp(double(a), -exponent)), exponent);
      return std::fabs(y) > 65504 ? std::copysign(double(kInf), y) : y;
    }
    default: return 0;
  }
}

int ReferenceI(int op, int a, int b) {
  const unsigned count = unsigned(b);
  switch (op) {
    case kAddI: return Wrap(int64_t{a} + b);
    case kSubI: return Wrap(int64_t{a} - b);
    case kMulI: return Wrap(int64_t{a} * b);
    case kDivI: return b == 0 ? -1 : Wrap(int64_t{a} / b);
    case kRemI: return b == 0 ? a : Wrap(int64_t{a} % b);
    case kMaxI: return std::max(a, b);
    case kMinI: return std::min(a, b);
    case kNegI: return Wrap(-int64_t{a});
    case kAbsI: return Wrap(std::abs(int64_t{a}));
    case kSignI: return a > 0 ? 1 : a < 0 ? -1 : 0;
    case kAndI: return a & b;
    case kOrI: return a | b;
    case kXorI: return a ^ b;
    case kNotI: return ~a;
    case kShlI: return count < 32 ? Wrap(int64_t{a} * (int64_t{1} << count)) : 0;
    case kShrAI: return count < 32 ? a >> count : a < 0 ? -1 : 0;
    case kShrLI: return count < 32 ? int(unsigned(a) >> count) : 0;
    default: return 0;
  }
}

bool ReferenceB(int op, Scalar a, Scalar b) {
  switch (op) {
    case kIsFiniteF: return std::isfinite(a.f);
    case kEqF: return a.f == b.f;
    case kNeF: return a.f != b.f;
    case kLtF: return a.f < b.f;
    case kLeF: return a.f <= b.f;
    case kEqI: return a.i == b.i;
    case kNeI: return a.i != b.i;
    case kLtI: return a.i < b.i;
    case kLeI: return a.i <= b.i;
    case kAndB: return a.i && b.i;
    case kOrB: return a.i || b.i;
    case kXorB: return (a.i != 0) != (b.i != 0);
    case kNotB: return !a.i;
    default: return false;
  }
}

// Allowed error in units in the last place; 0 is exact (any NaN for a NaN).
double AllowedUlps(int op) {
  switch (op) {
    case kDivF: return 1.5;  // by a reciprocal
    case kRsqrtF: return 1.5;
    case kFmaF: return 0.51;
    case kPowF: return 1.5;
    case kAtan2F: return 1.5;
    case kTanF: return 1.5;
    case kExpF:
    case kExp2F:
    case kExpm1F:
    case kLogF:
    case kLog1pF:
    case kSinF:
    case kCosF: return 1.6;
    case kTanhF: return 6.5;
    case kErfF: return 6.5;
    default: return 0;
  }
}

bool IsClose(double expected, float actual, double ulps) {
  const float rounded = float(expected);
  if (std::isnan(expected)) return std::isnan(actual);
  if (rounded == actual) return std::signbit(rounded) == std::signbit(actual);
  if (ulps == 0 || std::isinf(rounded) || std::isinf(actual)) {
    // Near the largest float one of the two may just have overflowed.
    return ulps > 0 && std::fabs(expected) > 3.4028230e38 && std::fabs(actual) > 3.4028230e38f &&
           (expected > 0) == (actual > 0);
  }
  const double ulp = std::ldexp(1.0, std::max(std::ilogb(expected), -126) - 23);
  return std::fabs(actual - expected) <= ulps * ulp;
}

std::vector<float> TestFloats(std::mt19937& random, int count) {
  std::vector<float> x = {
      0.0f,          -0.0f,       1.0f,  -1.0f,   kInf,   -kInf,   kNan,  1e-40f,     -1e-40f,       1.17549435e-38f,
      3.4e38f,       -3.4e38f,    0.5f,  -0.5f,   1.5f,   2.5f,    -2.5f, 8388609.0f, 2147483648.0f, -2147483648.0f,
      2147483520.0f, 3e9f,        88.7f, -103.0f, 127.9f, -149.5f, 1e4f,  -65519.0f,  65520.0f,      6e-8f,
      0.49999997f,   3.14159274f, -17.0f};
  std::uniform_real_distribution<float> unit(-1, 1), exponent(-126, 127), small(-20, 20);
  while (int(x.size()) < count) {
    switch (random() % 3) {
      case 0: x.push_back(small(random)); break;
      case 1: x.push_back(unit(random) * std::exp2(exponent(random))); break;
      default: x.push_back(std::floor(small(random)));
    }
  }
  return x;
}

std::vector<int> TestInts(std::mt19937& random, int count) {
  std::vector<int> x = {0,  1,   -1,      2,       -2,          3,           7,     31,   32,
                        33, -31, kIntMax, kIntMin, kIntMax - 1, kIntMin + 1, 65536, 46341};
  while (int(x.size()) < count) x.push_back(random() % 2 ? int(random()) : int(random() % 200) - 100);
  return x;
}

void TestOperations(const IsaKernels& isa) {
  constexpr int kScalars = 48;
  std::mt19937 random(1);
  std::vector<float> floats = TestFloats(random, 3 * kRowWidth);
  std::vector<int> ints = TestInts(random, 3 * kRowWidth);
  // Rows pair every special value with others; scalars are the special values themselves.
  std::vector<float> float_rows[3];
  std::vector<int> int_rows[3];
  std::vector<unsigned char> bool_rows[3];
  for (int k = 0; k < 3; ++k) {
    float_rows[k] = floats;
    int_rows[k] = ints;
    std::shuffle(float_rows[k].begin() + (k == 0 ? 3 * kRowWidth : 0), float_rows[k].end(), random);
    std::shuffle(int_rows[k].begin() + (k == 0 ? 3 * kRowWidth : 0), int_rows[k].end(), random);
    for (int c = 0; c < 3 * kRowWidth; ++c) bool_rows[k].push_back(random() % 2);
    // Exact quotients and their neighbours are where integer division goes wrong.
    if (k == 0) {
      for (int c = kRowWidth; c < 2 * kRowWidth; ++c) int_rows[k][c] = Wrap(int64_t{7} * (c - 300) * 10007 + c % 3 - 1);
    }
  }
  std::vector<Capture> captures;
  for (int k = 0; k < 3; ++k) captures.push_back(MakeCapture(float_rows[k].data(), DType::kF32, {3 * kRowWidth}));
  for (int k = 0; k < 3; ++k) captures.push_back(MakeCapture(int_rows[k].data(), DType::kS32, {3 * kRowWidth}));
  for (int k = 0; k < 3; ++k) captures.push_back(MakeCapture(bool_rows[k].data(), DType::kBool, {3 * kRowWidth}));
  const auto bits_at = [&](char type, int k, int i) {
    Scalar s = {};
    if (type == 'f') s.f = float_rows[k][i];
    if (type == 'i') s.i = int_rows[k][i];
    if (type == 'b') s.i = bool_rows[k][i] ? -1 : 0;
    return s;
  };

  for (int op = kAddF; op < kNumProgramOps; ++op) {
    for (const char selected : std::string(op == kSelect ? "fib" : "-")) {
      const OpInfo info = InfoOf(op);
      const int num_operands = int(info.operands.size());
      for (int form = 0; form < (1 << num_operands); ++form) {  // bit k set: operand k is a scalar
        Writer w;
        const int q = w.Input(kInputQ), kv = w.Input(kInputKv);
        int operand[3] = {};
        char types[3] = {};
        for (int k = 0; k < num_operands; ++k) {
          types[k] = info.operands[k] == '?' ? selected : info.operands[k];
          const int capture = k + (types[k] == 'f' ? 0 : types[k] == 'i' ? 3 : 6);
          const bool is_scalar = (form >> k) & 1;
          operand[k] = w.Load(capture, types[k], {is_scalar ? q : kv}, !is_scalar);
        }
        const int value = w.Op(op, operand[0], operand[1], operand[2]);
        const char type = info.result == '?' ? selected : info.result;
        const int result = type == 'f' ? value : type == 'i' ? w.Op(kBitsI32ToF32, value) : w.Op(kBoolToF32, value);
        const Program program = Decoded(w.Finish(result), captures);
        ProgramRunner runner(program, isa);
        runner.BindCaptures(captures.data());
        runner.BindHead(0, 0);
        const int num_rows = form == 0 ? 3 : kScalars;
        for (int row = 0; row < num_rows; ++row) {
          const int kv0 = form == 0 ? row * kRowWidth : row % 3 * kRowWidth;
          Row score = {};
          runner.BindRow(row);
          const float* out = runner.RunScore(score.lanes, kv0, kRowWidth);
          for (int c = 0; c < kRowWidth; ++c) {
            Scalar x[3] = {};
            for (int k = 0; k < num_operands; ++k) x[k] = bits_at(types[k], k, (form >> k) & 1 ? row : kv0 + c);
            bool ok;
            double expected;
            if (op == kSelect) {
              const Scalar y = x[0].i ? x[1] : x[2];
              expected = selected == 'b' ? double(y.i != 0) : double(y.f);
              ok = selected == 'b' ? out[c] == float(expected) : AsBits(out[c]) == y.i;
            } else if (op == kI32ToF32 || op == kBoolToF32) {
              expected = op == kI32ToF32 ? double(float(x[0].i)) : double(x[0].i != 0);
              ok = out[c] == expected;
            } else if (op == kBitsI32ToF32 || op == kBitsF32ToI32) {
              expected = x[0].f;
              ok = AsBits(out[c]) == x[0].i;
            } else if (op == kF32ToI32) {
              const float f = x[0].f;
              const int i = std::isnan(f) ? 0 : f >= 2147483648.0f ? kIntMax : f <= -2147483648.0f ? kIntMin : int(f);
              expected = i;
              ok = AsBits(out[c]) == i;
            } else if (op == kBoolToI32) {
              expected = x[0].i != 0;
              ok = AsBits(out[c]) == int(expected);
            } else if (type == 'f') {
              expected = ReferenceF(op, x[0].f, x[1].f, x[2].f);
              ok = IsClose(expected, out[c], AllowedUlps(op));
              if (!ok && op == kFmaF) {  // unfused where there is no such instruction
                const float product = x[0].f * x[1].f;
                ok = IsClose(double(product + x[2].f), out[c], 0) || std::isnan(product + x[2].f);
              }
              if ((op == kMaxF || op == kMinF) && out[c] == 0 && expected == 0) ok = true;  // which zero is open
              // A quotient's reciprocal may overflow or lose bits where the quotient is denormal.
              if (op == kDivF && std::fabs(expected) < 1.2e-38) ok = std::fabs(out[c]) < 1.3e-38f;
            } else if (type == 'i') {
              expected = ReferenceI(op, x[0].i, x[1].i);
              ok = AsBits(out[c]) == ReferenceI(op, x[0].i, x[1].i);
            } else {
              expected = ReferenceB(op, x[0], x[1]);
              ok = out[c] == float(expected);
            }
            CHECK(ok, "%s: %s form %d of (%.9g|%d, %.9g|%d, %.9g): %.9g|%d, expected %.9g", isa.name, OpName(op), form,
                  double(x[0].f), x[0].i, double(x[1].f), x[1].i, double(x[2].f), double(out[c]), AsBits(out[c]),
                  expected);
          }
        }
      }
    }
  }
}

// ---- random programs
// -----------------------------------------------------------------------------------------------

struct RandomProgram {
  std::vector<int32_t> code;
  std::vector<std::array<int, 8>> values;  // op, type, stage, -, a, b, c, imm
};

// Small integers everywhere, in int32 and in float32, so that most float arithmetic is exact
// however it is fused.
struct TestArrays {
  std::vector<float> table;
  std::vector<int> ids;
  std::vector<unsigned char> mask;
  std::vector<Capture> captures;
  TestArrays() : table(5 * 40), ids(48), mask(12 * 40) {
    std::mt19937 random(2);
    for (float& x : table) x = float(int(random() % 9) - 4);
    for (int& x : ids) x = int(random() % 5);
    std::sort(ids.begin(), ids.end());
    for (auto& x : mask) x = random() % 8 != 0;
    captures = {MakeCapture(table.data(), DType::kF32, {5, 40}), MakeCapture(ids.data(), DType::kS32, {48}),
                MakeCapture(mask.data(), DType::kBool, {12, 40})};
  }
};

std::vector<int32_t> RandomCode(std::mt19937& random, bool is_mask, bool all_operations, int length) {
  Writer w(random() % 4 != 0);
  std::map<char, std::vector<int>> pool;
  const auto pick = [&](char type) {
    const auto& ids = pool[type];
    // Mostly recent values, so that chains form.
    const size_t n = ids.size();
    return random() % 2 ? ids[n - 1 - random() % std::min<size_t>(n, 3)] : ids[random() % n];
  };
  const auto add = [&](int id) {
    pool[w.type(id) == kTypeF32 ? 'f' : w.type(id) == kTypeI32 ? 'i' : 'b'].push_back(id);
  };
  for (const ProgramInput input : {kInputB, kInputH, kInputQ, kInputKv}) add(w.Input(input));
  if (!is_mask) add(w.Input(kInputScore));
  static constexpr int kInts[] = {0, 1, 2, 3, 5, 8, -1, -3, kIntMax, kIntMin, 100};
  add(w.ConstI(kInts[random() % std::size(kInts)]));
  add(w.ConstI(kInts[random() % 6]));
  add(w.Const(float(int(random() % 7) - 3)));
  add(w.Op(kI32ToF32, pick('i')));
  add(w.Op(kLeI, pick('i'), pick('i')));
  static constexpr int kInexact[] = {kDivF,   kRemF, kPowF,   kAtan2F, kSqrtF, kRsqrtF, kExpF, kExp2F,
                                     kExpm1F, kLogF, kLog1pF, kTanhF,  kSinF,  kCosF,   kTanF, kErfF};
  while (w.size() < length) {
    const int choice = int(random() % 10);
    if (choice == 0) {
      const int kv = 3;  // the input's id
      const bool has_unit_stride = random() % 2;
      switch (random() % 3) {
        case 0: add(w.Load(0, 'f', {pick('i'), has_unit_stride ? kv : pick('i')}, has_unit_stride)); break;
        case 1: add(w.Load(1, 'i', {has_unit_stride ? kv : pick('i')}, has_unit_stride)); break;
        default: add(w.Load(2, 'b', {pick('i'), pick('i')}));
      }
      continue;
    }
    int op = kAddF + int(random() % (kNumProgramOps - kAddF));
    if (choice <= 3) {  // the usual ones more often
      static constexpr int kUsual[] = {kAddI, kSubI, kSubI,   kMulI,     kMinI, kMaxI, kLeI,  kLtI,  kEqI,
                                       kAndB, kOrB,  kSelect, kI32ToF32, kMulF, kAddF, kSubF, kDivI, kRemI};
      op = kUsual[random() % std::size(kUsual)];
    }
    if (!all_operations && std::find(std::begin(kInexact), std::end(kInexact), op) != std::end(kInexact)) continue;
    if (!all_operations && op == kBitsI32ToF32) continue;  // would make denormals
    const OpInfo info = InfoOf(op);
    const char selected = "fib"[random() % 3];
    int x[3] = {};
    for (size_t k = 0; k < info.operands.size(); ++k)
      x[k] = pick(info.operands[k] == '?' ? selected : info.operands[k]);
    add(w.Op(op, x[0], x[1], x[2]));
  }
  const auto& results = pool[is_mask ? 'b' : 'f'];
  return w.Finish(results.back());
}

// One element by the plain rules, straight from the bytecode. `is_exact` becomes false when a float
// result is rounded: then a fused product may differ.
Scalar Interpret(const std::vector<int32_t>& code, const std::vector<Capture>& captures, int b, int h, int q, int kv,
                 float score, bool* is_exact) {
  const int n = code[1];
  const int32_t* records = code.data() + 7 + 2 * code[5];
  const int32_t* extra = records + 8 * n;
  std::vector<Scalar> values(n);
  for (int id = 0; id < n; ++id) {
    const int32_t* r = records + 8 * id;
    Scalar& out = values[id];
    if (r[0] == kConst) {
      out.i = r[7];
    } else if (r[0] == kInput) {
      const int inputs[] = {AsBits(score), b, h, q, kv, 0};
      out.i = inputs[r[4]];
    } else if (r[0] == kLoad) {
      const Capture& capture = captures[r[4]];
      int64_t offset = 0;
      for (int d = 0; d < capture.rank; ++d) {
        offset += std::clamp<int64_t>(values[extra[r[5] + d]].i, 0, capture.dims[d] - 1) * capture.strides[d];
      }
      out.i = r[1] == kTypeBool ? (static_cast<const unsigned char*>(capture.data)[offset] ? -1 : 0)
                                : static_cast<const int*>(capture.data)[offset];
    } else {
      const OpInfo info = InfoOf(r[0]);
      const Scalar zero = {};
      const Scalar x = values[r[4]], y = info.operands.size() > 1 ? values[r[5]] : zero,
                   z = info.operands.size() > 2 ? values[r[6]] : zero;
      out = ComputeScalar(ProgramOp(r[0]), x, y, z);
      double exact = out.f;
      if (r[0] == kAddF) exact = double(x.f) + double(y.f);
      if (r[0] == kSubF) exact = double(x.f) - double(y.f);
      if (r[0] == kMulF) exact = double(x.f) * double(y.f);
      if (r[0] == kFmaF) exact = double(x.f) * double(y.f) + double(z.f);
      if (info.result == 'f' && exact != double(out.f) && !std::isnan(out.f)) *is_exact = false;
      if (info.result == 'f' && std::isinf(out.f)) *is_exact = false;
    }
  }
  return values[code[3]];
}

void TestRandomScorePrograms(const IsaKernels& isa) {
  const TestArrays arrays;
  std::mt19937 random(3);
  int64_t compared = 0, skipped = 0;
  for (int trial = 0; trial < 1500; ++trial) {
    const std::vector<int32_t> code = RandomCode(random, false, false, 12 + int(random() % 30));
    const Program program = Decoded(code, arrays.captures);
    ProgramRunner runner(program, isa);
    runner.BindCaptures(arrays.captures.data());
    const int num_lanes = 1 + int(random() % kRowWidth);
    const int b = int(random() % 3), h = int(random() % 4), q = int(random() % 50), kv0 = int(random() % 60) - 10;
    runner.BindHead(b, h);
    runner.BindRow(q);
    Row score, copy;
    for (float& x : score.lanes) x = float(int(random() % 11) - 5);
    copy = score;
    const float* out = runner.RunScore(score.lanes, kv0, num_lanes);
    for (int c = 0; c < num_lanes; c += 1 + int(random() % 7)) {
      bool is_exact = true;
      const float expected = Interpret(code, arrays.captures, b, h, q, kv0 + c, copy.lanes[c], &is_exact).f;
      const bool is_same = out[c] == expected || (std::isnan(out[c]) && std::isnan(expected));
      (is_exact ? compared : skipped) += 1;
      CHECK(!is_exact || is_same, "%s: random program %d lane %d: %g, expected %g", isa.name, trial, c, double(out[c]),
            double(expected));
    }
  }
  CHECK(compared > skipped, "only %lld of %lld compared", (long long)compared, (long long)(compared + skipped));
}

void TestRandomMasksAndIntervals(const IsaKernels& isa) {
  const TestArrays arrays;
  std::mt19937 random(4);
  int decided = 0, uniform = 0, total = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    const std::vector<int32_t> code = RandomCode(random, true, trial % 2 == 0, 10 + int(random() % 16));
    const Program program = Decoded(code, arrays.captures);
    ProgramRunner runner(program, isa);
    runner.BindCaptures(arrays.captures.data());
    const auto range = [&](int start, int longest) {
      const int64_t first = random() % 20 == 0   ? kIntMax - longest - int64_t(random() % 3)
                            : random() % 20 == 0 ? kIntMin + int64_t(random() % 3)
                                                 : start;
      return IndexRange{first, first + int64_t(random() % longest)};
    };
    for (int tile = 0; tile < 2; ++tile) {
      const IndexRange b = range(int(random() % 3), 2), h = range(int(random() % 4), 2),
                       q = range(int(random() % 40), 6), kv = range(int(random() % 40), tile == 0 ? 5 : 40);
      bool any = false, all = true;
      for (int64_t bb = b.first; bb <= b.last; ++bb) {
        for (int64_t hh = h.first; hh <= h.last; ++hh) {
          runner.BindHead(int(bb), int(hh));
          for (int64_t qq = q.first; qq <= q.last; ++qq) {
            runner.BindRow(int(qq));
            uint32_t bits[kRowWidth / 32];
            const int num_lanes = int(kv.last - kv.first + 1);
            runner.RunMask(int(kv.first), num_lanes, bits);
            for (int c = 0; c < kRowWidth; ++c) {
              const bool is_live = (bits[c / 32] >> (c % 32)) & 1;
              if (c >= num_lanes) {
                CHECK(!is_live, "lane %d of %d", c, num_lanes);
                continue;
              }
              any |= is_live;
              all &= is_live;
            }
          }
        }
      }
      const Liveness liveness = program.Classify(arrays.captures.data(), b, h, q, kv);
      CHECK(liveness != Liveness::kNone || !any, "random mask %d is not empty", trial);
      CHECK(liveness != Liveness::kAll || all, "random mask %d is not full", trial);
      ++total;
      uniform += !any || all;
      decided += liveness != Liveness::kMixed;
    }
  }
  std::printf("%s: intervals decided %d of the %d uniform boxes (%d in all)\n", isa.name, decided, uniform, total);
  CHECK(decided * 10 > uniform * 6, "the intervals decide too little");
}

// Masks of real models, where exact answers are wanted.
void TestIntervalPrecision() {
  constexpr int kSize = 1024;
  std::vector<int> segments(kSize), lengths = {700};
  for (int i = 0; i < kSize; ++i) segments[i] = i / 300;
  const std::vector<Capture> captures = {MakeCapture(segments.data(), DType::kS32, {1, kSize}),
                                         MakeCapture(lengths.data(), DType::kS32, {1})};
  struct Case {
    const char* name;
    std::function<int(Writer&)> build;
    std::function<bool(int, int)> reference;
  };
  const Case cases[] = {
      {"causal", [](Writer& w) { return w.Op(kLeI, w.Input(kInputKv), w.Input(kInputQ)); },
       [](int q, int kv) { return kv <= q; }},
      {"causal as a difference",
       [](Writer& w) {
         const int q = w.Input(kInputQ), kv = w.Input(kInputKv);
         return w.Op(kLeI, w.ConstI(0), w.Op(kSubI, q, kv));
       },
       [](int q, int kv) { return q - kv >= 0; }},
      {"window",
       [](Writer& w) {
         const int q = w.Input(kInputQ), kv = w.Input(kInputKv), d = w.Op(kSubI, q, kv);
         return w.Op(kAndB, w.Op(kLeI, kv, q), w.Op(kLtI, d, w.ConstI(200)));
       },
       [](int q, int kv) { return kv <= q && q - kv < 200; }},
      {"window with floats",
       [](Writer& w) {
         const int q = w.Input(kInputQ), kv = w.Input(kInputKv), d = w.Op(kI32ToF32, w.Op(kSubI, kv, q));
         return w.Op(kLeF, w.Op(kAbsF, d), w.Const(128));
       },
       [](int q, int kv) { return std::abs(q - kv) <= 128; }},
      {"cancelling terms",
       [](Writer& w) {
         const int q = w.Input(kInputQ), kv = w.Input(kInputKv), d = w.Op(kSubI, kv, q);
         return w.Op(kLtI, w.Op(kAddI, d, q), w.ConstI(512));
       },
       [](int, int kv) { return kv < 512; }},
      {"segments",
       [](Writer& w) {
         const int b = w.Input(kInputB), q = w.Input(kInputQ), kv = w.Input(kInputKv);
         return w.Op(kEqI, w.Load(0, 'i', {b, q}), w.Load(0, 'i', {b, kv}, true));
       },
       [](int q, int kv) { return q / 300 == kv / 300; }},
      {"padding", [](Writer& w) { return w.Op(kLtI, w.Input(kInputKv), w.Load(1, 'i', {w.Input(kInputB)})); },
       [](int, int kv) { return kv < 700; }},
      {"chunks",
       [](Writer& w) {
         const int q = w.Input(kInputQ), kv = w.Input(kInputKv), n = w.ConstI(256);
         return w.Op(kEqI, w.Op(kDivI, q, n), w.Op(kDivI, kv, n));
       },
       [](int q, int kv) { return q / 256 == kv / 256; }},
      {"chunks by a shift",
       [](Writer& w) {
         const int q = w.Input(kInputQ), kv = w.Input(kInputKv), n = w.ConstI(8);
         return w.Op(kEqI, w.Op(kShrAI, q, n), w.Op(kShrAI, kv, n));
       },
       [](int q, int kv) { return q / 256 == kv / 256; }},
  };
  for (const Case& c : cases) {
    Writer w;
    const int result = c.build(w);
    const Program program = Decoded(w.Finish(result), captures);
    for (int q0 = 0; q0 < kSize; q0 += 64) {
      for (int kv0 = 0; kv0 < kSize; kv0 += 128) {
        bool any = false, all = true;
        for (int q = q0; q < q0 + 64; ++q) {
          for (int kv = kv0; kv < kv0 + 128; ++kv) {
            any |= c.reference(q, kv);
            all &= c.reference(q, kv);
          }
        }
        const Liveness expected = !any ? Liveness::kNone : all ? Liveness::kAll : Liveness::kMixed;
        const Liveness actual = program.Classify(captures.data(), {0, 0}, {0, 0}, {q0, q0 + 63}, {kv0, kv0 + 127});
        CHECK(actual == expected, "%s at (%d, %d): %d, expected %d", c.name, q0, kv0, int(actual), int(expected));
      }
    }
  }
}

// ---- damaged bytecode
// ----------------------------------------------------------------------------------------------

void TestDamagedBytecode(const IsaKernels& isa) {
  const TestArrays arrays;
  std::mt19937 random(5);
  int accepted = 0, refused = 0;
  const auto try_code = [&](const std::vector<int32_t>& code) {
    Program program;
    const std::string error =
        program.Decode(code.data(), int64_t(code.size()), arrays.captures.data(), int(arrays.captures.size()));
    if (!error.empty()) {
      ++refused;
      CHECK(program.empty() && error.rfind("program: ", 0) == 0, "%s", error.c_str());
      return;
    }
    ++accepted;  // then it also has to run
    ProgramRunner runner(program, isa);
    runner.BindCaptures(arrays.captures.data());
    runner.BindHead(1, 2);
    runner.BindRow(3);
    Row score = {}, ct = {};
    uint32_t bits[kRowWidth / 32];
    const int num_lanes = 1 + int(random() % kRowWidth);
    const Liveness liveness = program.Classify(arrays.captures.data(), {0, 1}, {0, 1}, {0, 9}, {0, 9});
    if (program.is_mask()) {
      runner.RunMask(int(random() % 100), num_lanes, bits);
    } else {
      CHECK(liveness == Liveness::kMixed, "a score is no mask");
      runner.RunScore(score.lanes, int(random() % 100), num_lanes);
      if (program.has_derivative()) {
        std::vector<float> grad(5 * 40);
        std::vector<CaptureGrad> grads(arrays.captures.size());
        grads[0].data = grad.data();
        runner.RunDerivative(ct.lanes, nullptr, num_lanes);
        runner.AddLoadGrads(grads.data(), nullptr, num_lanes);
      }
    }
  };
  for (int trial = 0; trial < 30000; ++trial) {
    std::vector<int32_t> code;
    if (trial % 10 == 0) {
      code.resize(random() % 60);
      for (int32_t& x : code) x = random() % 4 == 0 ? int(random()) : int(random() % 12) - 1;
      if (!code.empty()) code[0] = 1;
    } else {
      code = RandomCode(random, trial % 2, true, 10 + int(random() % 10));
      const int damages = 1 + int(random() % 3);
      for (int k = 0; k < damages; ++k) {
        int32_t& x = code[random() % code.size()];
        switch (random() % 4) {
          case 0: x = int(random()); break;
          case 1: x = Wrap(int64_t{x} + int(random() % 5) - 2); break;
          case 2: x = int(random() % 20) - 2; break;
          default: x = random() % 2 ? kIntMax : kIntMin;
        }
      }
      if (random() % 10 == 0) code.resize(random() % code.size());
    }
    try_code(code);
  }
  CHECK(accepted > 1000 && refused > 5000, "%d accepted, %d refused", accepted, refused);

  // Messages name the value and what is wrong with it.
  Writer w;
  const int score = w.Input(kInputScore);
  std::vector<int32_t> code = w.Finish(w.Op(kExpF, score));
  const auto message = [&](int position, int32_t value) {
    std::vector<int32_t> damaged = code;
    damaged[position] = value;
    Program program;
    return program.Decode(damaged.data(), int64_t(damaged.size()), nullptr, 0);
  };
  CHECK(message(0, 2) == "program: bytecode version 2, expected 1", "%s", message(0, 2).c_str());
  CHECK(message(7 + 8, 1000) == "program: value 1 (op 1000) is no operation", "%s", message(7 + 8, 1000).c_str());
  CHECK(message(7 + 8 + 4, 1) == "program: value 1 (exp.f32) has a wrong operand", "%s", message(7 + 8 + 4, 1).c_str());
  CHECK(message(7 + 8 + 3, 9) == "program: value 1 (exp.f32) uses register 9", "%s", message(7 + 8 + 3, 9).c_str());
  CHECK(message(3, 7) == "program: the result 7 is not a score or a mask", "%s", message(3, 7).c_str());
}

// ---- loads and their gradients
// -------------------------------------------------------------------------------------

template <class T>
void TestLoadsOf(const IsaKernels& isa, DType dtype, char type, const std::vector<T>& data,
                 const std::function<int(T)>& bits_of) {
  const int size = int(data.size());
  const std::vector<Capture> captures = {MakeCapture(data.data(), dtype, {1, size})};
  for (const bool unit_stride : {true, false}) {
    for (const bool is_scalar : {false, true}) {
      Writer w;
      const int zero = w.ConstI(0), q = w.Input(kInputQ), kv = w.Input(kInputKv);
      const int index = is_scalar ? q : w.Op(kAddI, kv, q);
      const int load = w.Load(0, type, {zero, index}, unit_stride && !is_scalar);
      const int result = type == 'f' ? load : type == 'i' ? w.Op(kBitsI32ToF32, load) : w.Op(kBoolToF32, load);
      const Program program = Decoded(w.Finish(result), captures);
      ProgramRunner runner(program, isa);
      runner.BindCaptures(captures.data());
      runner.BindHead(0, 0);
      for (const int shift : {0, 1, -3, -size, -1000, size - 2, size, 5000, kIntMax - 20, kIntMin + 3}) {
        for (const int num_lanes : {1, 7, 16, 100, kRowWidth}) {
          Row score = {};
          runner.BindRow(shift);
          const float* out = runner.RunScore(score.lanes, 2, num_lanes);
          for (int c = 0; c < num_lanes; ++c) {
            const int64_t i = is_scalar ? shift : Wrap(int64_t{shift} + 2 + c);
            const int bits = bits_of(data[std::clamp<int64_t>(i, 0, size - 1)]);
            const float expected = type == 'b' ? float(bits != 0) : AsFloat(bits);
            CHECK(AsBits(out[c]) == AsBits(expected), "%s: dtype %d lane %d shift %d: %x, expected %x", isa.name,
                  int(dtype), c, shift, AsBits(out[c]), AsBits(expected));
          }
        }
      }
    }
  }
}

float HalfValue(uint16_t h) {
  const int exponent = (h >> 10) & 31, mantissa = h & 1023;
  const double x = exponent == 0    ? std::ldexp(mantissa, -24)
                   : exponent == 31 ? (mantissa ? double(kNan) : double(kInf))
                                    : std::ldexp(1024 + mantissa, exponent - 25);
  return float(h & 0x8000 ? -x : x);
}

template <class T>
std::vector<T> RandomData(std::mt19937& random, int size) {
  std::vector<T> data(size);
  for (T& x : data) x = T(uint64_t(random()) << 32 | random());
  return data;
}

void TestLoads(const IsaKernels& isa) {
  std::mt19937 random(6);
  const std::vector<float> floats = TestFloats(random, 300);
  TestLoadsOf<float>(isa, DType::kF32, 'f', floats, AsBits);
  std::vector<double> doubles(floats.begin(), floats.end());
  doubles.push_back(1e300);
  TestLoadsOf<double>(isa, DType::kF64, 'f', doubles, [](double x) { return AsBits(float(x)); });
  TestLoadsOf<uint16_t>(isa, DType::kBF16, 'f', RandomData<uint16_t>(random, 77),
                        [](uint16_t x) { return int(unsigned(x) << 16); });
  std::vector<uint16_t> halves = {0, 0x8000, 1, 0x3ff, 0x400, 0x3c00, 0x7bff, 0x7c00, 0xfc00, 0x83ff};
  while (halves.size() < 300) {
    const uint16_t h = uint16_t(random());
    if ((h & 0x7c00) != 0x7c00) halves.push_back(h);
  }
  TestLoadsOf<uint16_t>(isa, DType::kF16, 'f', halves, [](uint16_t x) { return AsBits(HalfValue(x)); });
  const auto as_int = [](auto x) { return int(x); };
  TestLoadsOf<int8_t>(isa, DType::kS8, 'i', RandomData<int8_t>(random, 65), as_int);
  TestLoadsOf<uint8_t>(isa, DType::kU8, 'i', RandomData<uint8_t>(random, 65), as_int);
  TestLoadsOf<int16_t>(isa, DType::kS16, 'i', RandomData<int16_t>(random, 1), as_int);
  TestLoadsOf<uint16_t>(isa, DType::kU16, 'i', RandomData<uint16_t>(random, 300), as_int);
  TestLoadsOf<int32_t>(isa, DType::kS32, 'i', RandomData<int32_t>(random, 300), as_int);
  TestLoadsOf<uint32_t>(isa, DType::kU32, 'i', RandomData<uint32_t>(random, 300),
                        [](uint32_t x) { return int(std::min<uint32_t>(x, uint32_t(kIntMax))); });
  std::vector<int64_t> longs = RandomData<int64_t>(random, 300);
  for (size_t k = 0; k < longs.size(); k += 2) longs[k] %= 1000;
  TestLoadsOf<int64_t>(isa, DType::kS64, 'i', longs,
                       [](int64_t x) { return int(std::clamp<int64_t>(x, kIntMin, kIntMax)); });
  TestLoadsOf<uint8_t>(isa, DType::kBool, 'b', RandomData<uint8_t>(random, 300), [](uint8_t x) { return x ? -1 : 0; });

  // Nothing to read: 0. And offsets beyond int32, in an array that is never touched outside its
  // first and last element.
  const std::vector<Capture> empty = {MakeCapture(floats.data(), DType::kF32, {3, 0})};
  Writer w;
  const int kv = w.Input(kInputKv);
  const std::vector<int32_t> code = w.Finish(w.Load(0, 'f', {kv, kv}));
  const Program program = Decoded(code, empty);
  ProgramRunner runner(program, isa);
  runner.BindCaptures(empty.data());
  runner.BindHead(0, 0);
  runner.BindRow(0);
  Row score = {};
  CHECK(runner.RunScore(score.lanes, 0, 5)[4] == 0, "empty array");

  Capture wide = MakeCapture(floats.data(), DType::kF32, {2, 10});
  wide.strides[0] = 10;
  wide.dims[0] = 1LL << 33;  // claims a long axis: offsets are computed in 64 bits, indices stay small
  Program wide_program = Decoded(code, {wide});
  ProgramRunner wide_runner(wide_program, isa);
  wide_runner.BindCaptures(&wide);
  wide_runner.BindHead(0, 0);
  wide_runner.BindRow(0);
  const float* out = wide_runner.RunScore(score.lanes, 0, 5);
  for (int c = 0; c < 5; ++c) CHECK(AsBits(out[c]) == AsBits(floats[11 * c]), "wide lane %d", c);
}

// score * scale[h] + table[q] + bias[kv + q] + rel[clamp(kv - q)] + big[b, kv / 2]: a load of each
// kind. Its derivative: ct * scale[h]; dscale = sum ct * score; the others sum ct at their index.
void TestDerivative(const IsaKernels& isa, bool is_shared, bool reuse_registers) {
  constexpr int kLanes = 200, kRows = 5;
  std::mt19937 random(7);
  std::uniform_real_distribution<float> uniform(-1, 1);
  const std::vector<std::vector<long long>> shapes = {{3}, {4}, {300}, {9}, {2, 50}};
  std::vector<std::vector<float>> data, grad;
  std::vector<std::vector<double>> expected;
  std::vector<Capture> captures;
  std::vector<CaptureGrad> grads;
  for (const auto& shape : shapes) {
    long long size = 1;
    for (const long long n : shape) size *= n;
    data.emplace_back(size);
    for (float& x : data.back()) x = uniform(random);
    grad.emplace_back(size);
    expected.emplace_back(size);
  }
  for (size_t k = 0; k < shapes.size(); ++k) {
    captures.push_back(MakeCapture(data[k].data(), DType::kF32, shapes[k]));
    grads.push_back({grad[k].data(), is_shared});
  }
  Writer w(reuse_registers);
  const int score = w.Input(kInputScore), b = w.Input(kInputB), h = w.Input(kInputH), q = w.Input(kInputQ),
            kv = w.Input(kInputKv);
  const int scale = w.Load(0, 'f', {h}), table = w.Load(1, 'f', {q});
  const int bias = w.Load(2, 'f', {w.Op(kAddI, kv, q)}, true);
  const int rel = w.Load(3, 'f', {w.Op(kAddI, w.Op(kSubI, kv, q), w.ConstI(4))});
  const int big = w.Load(4, 'f', {b, w.Op(kDivI, kv, w.ConstI(2))});
  int result = w.Op(kAddF, w.Op(kMulF, score, scale), table);
  for (const int x : {bias, rel, big}) result = w.Op(kAddF, result, x);
  const int ct = w.Input(kInputCt);
  const int dscore = w.Op(kMulF, ct, scale), dscale = w.Op(kMulF, ct, score);
  const Program program =
      Decoded(w.Finish(result, dscore, {{scale, dscale}, {table, ct}, {bias, ct}, {rel, ct}, {big, ct}}), captures);
  CHECK(program.has_derivative() && program.load_grads().size() == 5, "derivative");
  ProgramRunner runner(program, isa);
  runner.BindCaptures(captures.data());
  const int kv0 = 3;
  for (int head = 0; head < 3; ++head) {
    runner.BindHead(1, head);
    for (int q_idx = 0; q_idx < kRows; ++q_idx) {
      Row s, c, original, cotangent;
      uint32_t live[kRowWidth / 32];
      for (uint32_t& word : live) word = uint32_t(random());
      const bool all_live = q_idx == 2;
      for (int lane = 0; lane < kRowWidth; ++lane) {
        s.lanes[lane] = uniform(random);
        c.lanes[lane] = uniform(random);
        if (!all_live && !((live[lane / 32] >> (lane % 32)) & 1)) {
          c.lanes[lane] = lane % 2 ? kNan : kInf;  // must leave no trace
          s.lanes[lane] = kNan;
        }
      }
      original = s;
      cotangent = c;
      runner.BindRow(q_idx);
      const float* out = runner.RunScore(s.lanes, kv0, kLanes);
      const auto is_live = [&](int lane) { return all_live || ((live[lane / 32] >> (lane % 32)) & 1); };
      for (int lane = 0; lane < kLanes; ++lane) {
        const int k = kv0 + lane;
        const double value = double(original.lanes[lane]) * data[0][head] + data[1][std::min(q_idx, 3)] +
                             data[2][std::min(k + q_idx, 299)] + data[3][std::clamp(k - q_idx + 4, 0, 8)] +
                             data[4][50 + std::min(k / 2, 49)];
        if (is_live(lane)) CHECK(std::fabs(out[lane] - value) < 1e-5, "%s: score %d", isa.name, lane);
      }
      std::fill(std::begin(s.lanes), std::end(s.lanes),
                kNan);  // the caller does what it wants with its row
      const float* derivative = runner.RunDerivative(c.lanes, all_live ? nullptr : live, kLanes);
      for (int lane = 0; lane < kLanes; ++lane) {
        const float value = is_live(lane) ? cotangent.lanes[lane] * data[0][head] : 0.0f;
        CHECK(derivative[lane] == value, "%s: derivative %d: %g, expected %g", isa.name, lane, double(derivative[lane]),
              double(value));
      }
      std::fill(std::begin(c.lanes), std::end(c.lanes), kNan);
      runner.AddLoadGrads(grads.data(), all_live ? nullptr : live, kLanes);
      for (int lane = 0; lane < kLanes; ++lane) {
        if (!is_live(lane)) continue;
        const int k = kv0 + lane;
        const double x = cotangent.lanes[lane];
        expected[0][head] += x * original.lanes[lane];
        expected[1][std::min(q_idx, 3)] += x;
        expected[2][std::min(k + q_idx, 299)] += x;
        expected[3][std::clamp(k - q_idx + 4, 0, 8)] += x;
        expected[4][50 + std::min(k / 2, 49)] += x;
      }
    }
  }
  for (size_t k = 0; k < grad.size(); ++k) {
    for (size_t i = 0; i < grad[k].size(); ++i) {
      CHECK(std::fabs(grad[k][i] - expected[k][i]) < 2e-4, "%s: gradient of capture %zu at %zu: %g, expected %g",
            isa.name, k, i, double(grad[k][i]), expected[k][i]);
    }
  }
}

// Results and derivatives that are scalars or the caller's own rows.
void TestScalarResults(const IsaKernels& isa) {
  float table[] = {2.5f, 3.5f};
  float grad[2] = {};
  const std::vector<Capture> captures = {MakeCapture(table, DType::kF32, {2})};
  const CaptureGrad grads[] = {{grad, false}};
  Writer w;
  const int h = w.Input(kInputH), load = w.Load(0, 'f', {h}), one = w.Const(1), ct = w.Input(kInputCt);
  const Program program = Decoded(w.Finish(load, ct, {{load, one}}), captures);
  ProgramRunner runner(program, isa);
  runner.BindCaptures(captures.data());
  runner.BindHead(0, 1);
  runner.BindRow(0);
  Row s = {}, c;
  std::fill(std::begin(c.lanes), std::end(c.lanes), 7.0f);
  uint32_t live[kRowWidth / 32] = {0x5};
  const float* out = runner.RunScore(s.lanes, 0, 40);
  CHECK(out[0] == 3.5f && out[39] == 3.5f, "scalar score");
  const float* derivative = runner.RunDerivative(c.lanes, live, 40);
  CHECK(derivative[0] == 7 && derivative[1] == 0 && derivative[2] == 7 && derivative[39] == 0, "ct itself");
  runner.AddLoadGrads(grads, live, 40);
  CHECK(grad[1] == 2 && grad[0] == 0, "a constant gradient counts the live lanes: %g", double(grad[1]));

  for (const bool value : {false, true}) {
    Writer m;
    const int q = m.Input(kInputQ);
    const Program mask = Decoded(m.Finish(m.Op(kLeI, q, m.ConstI(value ? 5 : 2))), {});
    ProgramRunner mask_runner(mask, isa);
    mask_runner.BindHead(0, 0);
    mask_runner.BindRow(3);
    uint32_t bits[kRowWidth / 32];
    mask_runner.RunMask(0, 70, bits);
    CHECK(bits[0] == (value ? ~0u : 0) && bits[2] == (value ? 0x3fu : 0) && bits[3] == 0, "row mask");
  }
}

void TestRowMasks(const IsaKernels& isa) {
  std::mt19937 random(8);
  for (int num_lanes = 1; num_lanes <= kRowWidth; ++num_lanes) {
    alignas(64) int row[kRowWidth];
    Row floats;
    uint32_t bits[kRowWidth / 32], random_bits[kRowWidth / 32];
    for (uint32_t& word : random_bits) word = uint32_t(random());
    for (int c = 0; c < kRowWidth; ++c) {
      row[c] = random() % 2 ? 0 : random() % 2 ? -1 : int(random());
      floats.lanes[c] = kNan;
    }
    isa.row_to_bits(row, num_lanes, bits);
    isa.select_row(floats.lanes, random_bits, num_lanes);
    for (int c = 0; c < kRowWidth; ++c) {
      CHECK(((bits[c / 32] >> (c % 32)) & 1) == uint32_t(c < num_lanes && row[c] != 0), "bit %d of %d", c, num_lanes);
      const bool is_live = (random_bits[c / 32] >> (c % 32)) & 1;
      if (c < num_lanes) CHECK(is_live ? std::isnan(floats.lanes[c]) : floats.lanes[c] == 0, "select lane %d", c);
    }
  }
}

// ---- times
// ---------------------------------------------------------------------------------------------------------

double NanosecondsPer(int repeats, const std::function<void()>& f) {
  double best = 1e30;
  for (int round = 0; round < 7; ++round) {
    const auto start = std::chrono::steady_clock::now();
    for (int k = 0; k < repeats; ++k) f();
    const double t = std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count();
    best = std::min(best, t / repeats);
  }
  return best;
}

void Bench(const std::vector<IsaKernels>& isas) {
  std::vector<float> slopes(8, 0.1f), table(4096, 0.5f);
  std::vector<int> segments(4096);
  const std::vector<Capture> captures = {MakeCapture(slopes.data(), DType::kF32, {8}),
                                         MakeCapture(table.data(), DType::kF32, {4096}),
                                         MakeCapture(segments.data(), DType::kS32, {4096})};
  struct Case {
    const char* name;
    std::function<int(Writer&)> build;
  };
  const auto score_of = [](int op) { return [op](Writer& w) { return w.Op(op, w.Input(kInputScore)); }; };
  const Case cases[] = {
      {"3 simple",
       [](Writer& w) {
         const int s = w.Input(kInputScore), c = w.Const(1.5f);
         return w.Op(kMaxF, w.Op(kMulF, w.Op(kAddF, s, c), s), c);
       }},
      {"alibi",
       [](Writer& w) {
         const int s = w.Input(kInputScore), q = w.Input(kInputQ), kv = w.Input(kInputKv);
         const int slope = w.Load(0, 'f', {w.Input(kInputH)});
         return w.Op(kSubF, s, w.Op(kMulF, slope, w.Op(kI32ToF32, w.Op(kSubI, q, kv))));
       }},
      {"softcap",
       [](Writer& w) {
         const int s = w.Input(kInputScore), cap = w.Const(20);
         return w.Op(kMulF, cap, w.Op(kTanhF, w.Op(kDivF, s, cap)));
       }},
      {"tanh", score_of(kTanhF)},
      {"exp", score_of(kExpF)},
      {"log", score_of(kLogF)},
      {"erf", score_of(kErfF)},
      {"sin", score_of(kSinF)},
      {"pow",
       [](Writer& w) {
         const int s = w.Input(kInputScore);
         return w.Op(kPowF, s, w.Const(1.5f));
       }},
      {"bias load",
       [](Writer& w) {
         const int s = w.Input(kInputScore), kv = w.Input(kInputKv);
         return w.Op(kAddF, s, w.Load(1, 'f', {kv}, true));
       }},
      {"gather",
       [](Writer& w) {
         const int s = w.Input(kInputScore), q = w.Input(kInputQ), kv = w.Input(kInputKv);
         return w.Op(kAddF, s, w.Load(1, 'f', {w.Op(kAddI, w.Op(kSubI, q, kv), w.ConstI(2000))}));
       }},
      {"kv / 128",
       [](Writer& w) {
         const int s = w.Input(kInputScore), kv = w.Input(kInputKv);
         return w.Op(kAddF, s, w.Op(kI32ToF32, w.Op(kDivI, kv, w.ConstI(128))));
       }},
  };
  for (const IsaKernels& isa : isas) {
    std::printf("%s, ns per score:", isa.name);
    for (const Case& c : cases) {
      Writer w;
      const int result = c.build(w);
      const Program program = Decoded(w.Finish(result), captures);
      ProgramRunner runner(program, isa);
      runner.BindCaptures(captures.data());
      runner.BindHead(0, 1);
      Row score;
      for (int k = 0; k < kRowWidth; ++k) score.lanes[k] = 0.01f * float(k);
      const double t = NanosecondsPer(20000, [&] {
        score.lanes[0] = 1.0f;
        runner.BindRow(77);
        runner.RunScore(score.lanes, 100, kRowWidth);
      });
      std::printf("  %s %.3f", c.name, t / kRowWidth);
    }
    std::printf("\n");
  }
  Writer w;
  const int q = w.Input(kInputQ), kv = w.Input(kInputKv), d = w.Op(kSubI, q, kv);
  const int in_window = w.Op(kAndB, w.Op(kLeI, kv, q), w.Op(kLtI, d, w.ConstI(200)));
  const int far = w.Op(kLtI, w.ConstI(-5), d);
  const std::vector<int32_t> code = w.Finish(w.Op(kOrB, in_window, w.Op(kNotB, far)));
  const Program program = Decoded(code, captures);
  volatile int sink = 0;
  const double classify = NanosecondsPer(
      100000, [&] { sink = sink + int(program.Classify(captures.data(), {0, 0}, {0, 0}, {640, 703}, {256, 511})); });
  const double decode = NanosecondsPer(20000, [&] {
    Program decoded;
    decoded.Decode(code.data(), int64_t(code.size()), captures.data(), int(captures.size()));
  });
  std::printf("%d values: classify %.0f ns, decode %.0f ns\n", code[1], classify, decode);
}

}  // namespace
}  // namespace fkl

int main(int argc, char** argv) {
  const std::vector<fkl::IsaKernels> isas = fkl::AllIsas();
  if (argc > 1 && std::strcmp(argv[1], "--bench") == 0) {
    fkl::Bench(isas);
    return 0;
  }
  for (const fkl::IsaKernels& isa : isas) {
    const int failures_before = fkl::num_failures;
    fkl::TestOperations(isa);
    fkl::TestRandomScorePrograms(isa);
    fkl::TestRandomMasksAndIntervals(isa);
    fkl::TestDamagedBytecode(isa);
    fkl::TestLoads(isa);
    fkl::TestDerivative(isa, false, true);
    fkl::TestDerivative(isa, true, true);
    fkl::TestDerivative(isa, false, false);
    fkl::TestScalarResults(isa);
    fkl::TestRowMasks(isa);
    std::printf("%s: %s\n", isa.name, fkl::num_failures == failures_before ? "passed" : "FAILED");
  }
  fkl::TestIntervalPrecision();
  std::printf("%d failures\n", fkl::num_failures);
  return fkl::num_failures == 0 ? 0 : 1;
}
