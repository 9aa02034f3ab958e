// The forward pass.
//
// A tile is up to 128 query rows of one kv head (all of one query head, or, when there are few
// queries, of several) against 256 keys at a time: scores, softmax row by row, weighted values,
// with the running maximum and sum of the online softmax. Three ways to the keys and values:
//   packed   K^T and V of whole heads are packed once into a workspace and shared by the tiles of
//   all queries; local    all rows of a kv head fit one tile: each key tile is packed where it is
//   used, and the keys are split
//            over tasks whose partial results are merged in a fixed order;
//   in place as local with at most 4 rows: packing would cost more than it saves.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "cpu/attention_cpu.h"
#include "cpu/mask_plan.h"
#include "cpu/tile_product.h"
#include "cpu/workspace.h"

namespace fkl {
namespace {

constexpr int kTileRows = 128;
constexpr int kTileColumns = kRowWidth;
constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr double kSerialFlops = 2e6;  // below, handing out work costs more than it saves
constexpr size_t kPackedBytes = size_t{32} << 20;

enum class KeyAccess { kPacked, kLocal, kInPlace };

// The keys and values of one tile as the products read them.
struct KeyTile {
  const void* key_panels;  // floats, or pairs of bf16
  const void* values;
  bool has_nonfinite_value;
};

struct RowTile {
  int64_t outer;
  int kv_head;
  int first_head, num_heads;
  int64_t q_begin;
  int num_q;       // per head
  int num_live_q;  // those before the query length
  int num_rows() const { return num_heads * num_live_q; }
};

class ForwardCall {
 public:
  ForwardCall(const AttentionProblem& problem, const ForwardResults& results, const Executor& executor);
  void Run();

 private:
  // Per worker: 64-byte aligned arrays.
  struct Worker {
    void* query;    // [kTileRows][query_stride_] floats, or pairs of bf16
    float* scores;  // [kTileRows][kTileColumns]
    void* probs;    // the same memory as the scores, or [kTileRows][kTileColumns] bf16
    float* acc;     // [kTileRows][value_stride_]
    float *row_max, *row_sum, *row_scale;
    TileRow* rows;
    Strip* strips;
    void *local_keys, *local_values;
    std::vector<LiveTile> live_tiles;
    std::unique_ptr<ProgramRunner> score, mask;
  };

  // Where the packed copies of one head begin; `slot` counts heads in the workspace.
  struct PackedHead {
    float* keys;
    float* values;
    uint8_t* nonfinite;
  };
  PackedHead Packed(int64_t slot) const;

  void ReserveWorkers();
  void MakeWorkers();
  void RunPacked();
  void RunLocal();
  RowTile MakeRowTile(int64_t outer, int kv_head, int head_group, int64_t q_tile) const;
  TileRect KeyRect(const RowTile& tile, int64_t begin, int64_t end) const;
  bool PackKeys(const RowTile& tile, int64_t kv_begin, int num_kv, void* keys, void* values) const;
  void BeginTile(Worker& worker, const RowTile& tile) const;
  void VisitKeys(Worker& worker, const RowTile& tile, int64_t kv_begin, int num_kv, unsigned mixed,
                 const KeyTile& keys) const;
  void ScoreProduct(Worker& worker, int num_rows, int num_kv, bool is_mixed, const void* key_panels) const;
  const float* RowSteps(Worker& worker, int64_t outer, int head, int64_t q, int64_t kv_begin, int begin, int end,
                        float left_scale, float* scores) const;
  void ValueProduct(Worker& worker, int num_rows, int num_kv, bool is_mixed, const KeyTile& keys) const;
  void ValueProductSkippingZeros(Worker& worker, int num_rows, const void* values) const;
  void Softmax(Worker& worker, const RowTile& tile, int64_t kv_begin, int num_kv, const TileRow* rows) const;
  void StoreTile(Worker& worker, const RowTile& tile) const;
  void StoreZeroRow(int64_t outer, int64_t out_index) const;

  const AttentionProblem& p_;
  const ForwardResults& results_;
  const IsaKernels& isa_;
  Executor executor_;
  MaskPlan plan_;
  KeyAccess access_;
  bool uses_bf16_;            // products of bf16 pairs
  bool has_row_steps_;        // bias or score program
  int num_q_tiles_, q_tile_;  // query tiles of a head
  int heads_per_tile_, head_groups_;
  int kv_heads_per_tile_ = 1;  // more than one only in place
  int64_t query_stride_;       // in elements of 4 bytes (floats or pairs)
  int64_t value_stride_;       // floats of an accumulator row, words of a V row
  int key_depth_;              // k steps of the score product
  int keys_per_step_;          // of the value product: 2 with pairs

  Workspace workspace_;
  struct {
    size_t query, scores, probs, acc, row_state, rows, strips, local_keys, local_values;
  } at_;
  size_t packed_keys_ = 0, packed_values_ = 0, nonfinite_ = 0, partial_ = 0;
  int64_t kv_padded_;  // keys of a packed head
  int64_t num_kv_tiles_;
  std::vector<Worker> workers_;
};

ForwardCall::ForwardCall(const AttentionProblem& problem, const ForwardResults& results, const Executor& executor)
    : p_(problem), results_(results), isa_(*problem.isa), executor_(executor), plan_(problem) {
  const int64_t group = p_.group_size();
  num_q_tiles_ = static_cast<int>(CeilDiv(p_.q_seq_len, kTileRows));
  q_tile_ =
      static_cast<int>(std::min<int64_t>(RoundUp(CeilDiv(p_.q_seq_len, num_q_tiles_), isa_.strip_rows), kTileRows));
  num_q_tiles_ = static_cast<int>(CeilDiv(p_.q_seq_len, q_tile_));
  heads_per_tile_ = num_q_tiles_ > 1 ? 1 : static_cast<int>(std::min<int64_t>(group, kTileRows / p_.q_seq_len));
  head_groups_ = static_cast<int>(CeilDiv(group, heads_per_tile_));
  const bool is_one_tile = num_q_tiles_ == 1 && head_groups_ == 1;
  access_ = !is_one_tile                         ? KeyAccess::kPacked
            : group * p_.q_seq_len > kMaxDotRows ? KeyAccess::kLocal
                                                 : KeyAccess::kInPlace;
  // A row of keys holds all heads: read in one go, it comes at the speed of the memory. Masks that
  // tell heads apart would have to be live for all of them to skip anything.
  const bool heads_share_masks = !p_.block_mask && (p_.mask.empty() || !p_.head_index);
  if (access_ == KeyAccess::kInPlace && heads_share_masks) {
    kv_heads_per_tile_ = static_cast<int>(std::min<int64_t>(p_.num_kv_heads, kTileRows / (group * p_.q_seq_len)));
  }
  uses_bf16_ = p_.query.dtype == DType::kBF16 && !p_.full_precision && isa_.softmax_rows_bf16 != nullptr &&
               access_ != KeyAccess::kInPlace;
  has_row_steps_ = bool(p_.bias) || !p_.score.empty();
  key_depth_ = uses_bf16_ ? (p_.head_dim + 1) / 2 : p_.head_dim;
  keys_per_step_ = uses_bf16_ ? 2 : 1;
  query_stride_ = RoundUp(key_depth_, 16);
  value_stride_ = RoundUp(p_.value_head_dim, isa_.vector_width);
  num_kv_tiles_ = CeilDiv(p_.kv_seq_len, kTileColumns);
  kv_padded_ = RoundUp(p_.kv_seq_len, isa_.panel_width);
  const double flops = 2.0 * static_cast<double>(p_.num_outer() * p_.num_q_heads) * static_cast<double>(p_.q_seq_len) *
                       static_cast<double>(p_.kv_seq_len) * (p_.head_dim + p_.value_head_dim);
  if (flops < kSerialFlops) executor_.num_workers = 1;
}

void ForwardCall::Run() { access_ == KeyAccess::kPacked ? RunPacked() : RunLocal(); }

void ForwardCall::ReserveWorkers() {
  const int64_t n = executor_.num_workers;
  at_.query = workspace_.Reserve<float>(n * kTileRows * query_stride_);
  at_.scores = workspace_.Reserve<float>(n * kTileRows * kTileColumns);
  at_.probs = workspace_.Reserve<uint16_t>(uses_bf16_ ? n * kTileRows * kTileColumns : 0);
  at_.acc = workspace_.Reserve<float>(n * kTileRows * value_stride_);
  at_.row_state = workspace_.Reserve<float>(n * 3 * kTileRows);
  at_.rows = workspace_.Reserve<TileRow>(n * kTileRows);
  at_.strips = workspace_.Reserve<Strip>(n * kTileRows);
  const bool is_local = access_ == KeyAccess::kLocal;
  at_.local_keys = workspace_.Reserve<float>(is_local ? n * kTileColumns * key_depth_ : 0);
  at_.local_values = workspace_.Reserve<float>(is_local ? n * kTileColumns * value_stride_ : 0);
}

void ForwardCall::MakeWorkers() {
  workers_.resize(static_cast<size_t>(executor_.num_workers));
  for (int i = 0; i < executor_.num_workers; ++i) {
    Worker& w = workers_[static_cast<size_t>(i)];
    w.query = workspace_.At<float>(at_.query) + i * kTileRows * query_stride_;
    w.scores = workspace_.At<float>(at_.scores) + i * kTileRows * kTileColumns;
    w.probs = w.scores;
    if (uses_bf16_) w.probs = workspace_.At<uint16_t>(at_.probs) + i * kTileRows * kTileColumns;
    w.acc = workspace_.At<float>(at_.acc) + i * kTileRows * value_stride_;
    w.row_max = workspace_.At<float>(at_.row_state) + i * 3 * kTileRows;
    w.row_sum = w.row_max + kTileRows;
    w.row_scale = w.row_sum + kTileRows;
    w.rows = workspace_.At<TileRow>(at_.rows) + i * kTileRows;
    w.strips = workspace_.At<Strip>(at_.strips) + i * kTileRows;
    w.local_keys = workspace_.At<float>(at_.local_keys) + i * kTileColumns * key_depth_;
    w.local_values = workspace_.At<float>(at_.local_values) + i * kTileColumns * value_stride_;
    if (!p_.score.empty()) w.score = std::make_unique<ProgramRunner>(p_.score, isa_);
    if (!p_.mask.empty()) w.mask = std::make_unique<ProgramRunner>(p_.mask, isa_);
  }
}

RowTile ForwardCall::MakeRowTile(int64_t outer, int kv_head, int head_group, int64_t q_tile) const {
  RowTile tile;
  tile.outer = outer;
  tile.kv_head = kv_head;
  const int first = head_group * heads_per_tile_;
  tile.first_head = kv_head * p_.group_size() + first;
  tile.num_heads = std::min(heads_per_tile_, p_.group_size() - first);
  if (kv_heads_per_tile_ > 1) {
    tile.num_heads = std::min(kv_heads_per_tile_, p_.num_kv_heads - kv_head) * p_.group_size();
  }
  tile.q_begin = q_tile * q_tile_;
  tile.num_q = static_cast<int>(std::min<int64_t>(q_tile_, p_.q_seq_len - tile.q_begin));
  tile.num_live_q = static_cast<int>(std::clamp<int64_t>(p_.QueryLength(outer) - tile.q_begin, 0, tile.num_q));
  return tile;
}

TileRect ForwardCall::KeyRect(const RowTile& tile, int64_t begin, int64_t end) const {
  end = std::min(end, p_.KeyLength(tile.outer));
  return {tile.outer, tile.first_head, tile.num_heads, tile.q_begin, tile.num_live_q, begin, end - begin};
}

ForwardCall::PackedHead ForwardCall::Packed(int64_t slot) const {
  return {workspace_.At<float>(packed_keys_) + slot * kv_padded_ * key_depth_,
          workspace_.At<float>(packed_values_) + slot * kv_padded_ / keys_per_step_ * value_stride_,
          workspace_.At<uint8_t>(nonfinite_) + slot * num_kv_tiles_};
}

// Returns whether a value is not finite.
bool ForwardCall::PackKeys(const RowTile& tile, int64_t kv_begin, int num_kv, void* keys, void* values) const {
  const int64_t key_row = int64_t{p_.num_kv_heads} * p_.head_dim;
  const int64_t value_row = int64_t{p_.num_kv_heads} * p_.value_head_dim;
  PackArgs pack = {};
  pack.dtype = p_.key.dtype;
  pack.num_rows = num_kv;
  pack.padded_rows = static_cast<int>(RoundUp(num_kv, isa_.panel_width));
  pack.src = p_.key.Address(tile.outer, kv_begin * key_row + int64_t{tile.kv_head} * p_.head_dim);
  pack.src_stride = key_row;
  pack.num_columns = p_.head_dim;
  pack.out = keys;
  (uses_bf16_ ? isa_.pack_panels_bf16 : isa_.pack_panels)(pack);
  pack.src = p_.value.Address(tile.outer, kv_begin * value_row + int64_t{tile.kv_head} * p_.value_head_dim);
  pack.src_stride = value_row;
  pack.num_columns = p_.value_head_dim;
  pack.scale = 1.0f;
  pack.out = values;
  pack.out_stride = value_stride_;
  return (uses_bf16_ ? isa_.pack_row_pairs_bf16 : isa_.pack_rows)(pack);
}

void ForwardCall::RunPacked() {
  const int64_t num_heads = p_.num_outer() * p_.num_kv_heads;
  const size_t head_bytes =
      static_cast<size_t>(kv_padded_ * (key_depth_ + value_stride_ / keys_per_step_)) * sizeof(float);
  // More heads than fit the bound are done in waves, so that memory does not grow with the batch.
  const int64_t wave =
      std::clamp<int64_t>(static_cast<int64_t>(kPackedBytes / std::max<size_t>(head_bytes, 1)), 1, num_heads);
  ReserveWorkers();
  packed_keys_ = workspace_.Reserve<float>(wave * kv_padded_ * key_depth_);
  packed_values_ = workspace_.Reserve<float>(wave * kv_padded_ / keys_per_step_ * value_stride_);
  nonfinite_ = workspace_.Reserve<uint8_t>(wave * num_kv_tiles_);
  workspace_.Allocate();
  MakeWorkers();
  const auto head_of = [&](int64_t head) {
    return MakeRowTile(head / p_.num_kv_heads, static_cast<int>(head % p_.num_kv_heads), 0, 0);
  };
  for (int64_t first = 0; first < num_heads; first += wave) {
    const int64_t count = std::min(wave, num_heads - first);
    ParallelFor(executor_, count * num_kv_tiles_, [&](int64_t task, int) {
      const int64_t slot = task / num_kv_tiles_, kv_tile = task % num_kv_tiles_;
      const RowTile head = head_of(first + slot);
      const int64_t kv_begin = kv_tile * kTileColumns;
      const int64_t num_kv = std::min<int64_t>(kTileColumns, p_.KeyLength(head.outer) - kv_begin);
      if (num_kv <= 0) return;
      const PackedHead packed = Packed(slot);
      packed.nonfinite[kv_tile] =
          PackKeys(head, kv_begin, static_cast<int>(num_kv), packed.keys + kv_begin * key_depth_,
                   packed.values + kv_begin / keys_per_step_ * value_stride_);
    });
    // Head by head, so that the tiles at work at one time share a head's keys; in a head the last
    // queries first, which under a causal mask see most keys.
    const int64_t tiles_per_head = int64_t{head_groups_} * num_q_tiles_;
    ParallelFor(executor_, count * tiles_per_head, [&](int64_t task, int worker_number) {
      Worker& worker = workers_[static_cast<size_t>(worker_number)];
      const int64_t slot = task / tiles_per_head, in_head = task % tiles_per_head;
      const RowTile head = head_of(first + slot);
      const RowTile tile = MakeRowTile(head.outer, head.kv_head, static_cast<int>(in_head / num_q_tiles_),
                                       num_q_tiles_ - 1 - in_head % num_q_tiles_);
      const PackedHead packed = Packed(slot);
      BeginTile(worker, tile);
      const TileRect rect = KeyRect(tile, 0, p_.kv_seq_len);
      plan_.LiveKeyTiles(rect, kTileColumns, &worker.live_tiles);
      for (const LiveTile& live : worker.live_tiles) {
        const int64_t kv_begin = live.index * kTileColumns + live.begin;
        VisitKeys(worker, tile, kv_begin, live.end - live.begin, live.mixed,
                  {packed.keys + kv_begin * key_depth_, packed.values + kv_begin / keys_per_step_ * value_stride_,
                   packed.nonfinite[live.index] != 0});
      }
      StoreTile(worker, tile);
    });
  }
}

void ForwardCall::RunLocal() {
  const int64_t heads_per_outer = CeilDiv(p_.num_kv_heads, kv_heads_per_tile_);
  const int64_t num_heads = p_.num_outer() * heads_per_outer;
  // The split depends on shapes alone, so the result does not depend on the number of threads.
  constexpr int64_t kEnoughTasks = 32, kMaxChunks = 64, kMinChunkTiles = 4;
  int64_t chunk_tiles = std::max<int64_t>(num_kv_tiles_, 1);
  if (num_heads < kEnoughTasks) {
    chunk_tiles = std::max(kMinChunkTiles, CeilDiv(num_kv_tiles_, kMaxChunks));
  }
  const int64_t num_chunks = std::max<int64_t>(CeilDiv(num_kv_tiles_, chunk_tiles), 1);
  const int64_t max_rows = int64_t{kv_heads_per_tile_} * p_.group_size() * p_.q_seq_len;
  const int64_t partial_size = max_rows * (value_stride_ + 2);
  ReserveWorkers();
  partial_ = workspace_.Reserve<float>(num_chunks > 1 ? num_heads * num_chunks * partial_size : 0);
  workspace_.Allocate();
  MakeWorkers();
  const auto partial_of = [&](int64_t head, int64_t chunk) {
    return workspace_.At<float>(partial_) + (head * num_chunks + chunk) * partial_size;
  };
  const auto tile_of = [&](int64_t head) {
    return MakeRowTile(head / heads_per_outer, static_cast<int>(head % heads_per_outer) * kv_heads_per_tile_, 0, 0);
  };
  ParallelFor(executor_, num_heads * num_chunks, [&](int64_t task, int worker_number) {
    Worker& worker = workers_[static_cast<size_t>(worker_number)];
    const int64_t head = task / num_chunks, chunk = task % num_chunks;
    const RowTile tile = tile_of(head);
    const int64_t chunk_begin = chunk * chunk_tiles * kTileColumns;
    BeginTile(worker, tile);
    const TileRect rect = KeyRect(tile, chunk_begin, chunk_begin + chunk_tiles * kTileColumns);
    plan_.LiveKeyTiles(rect, kTileColumns, &worker.live_tiles);
    for (const LiveTile& live : worker.live_tiles) {
      const int64_t kv_begin = chunk_begin + live.index * kTileColumns + live.begin;
      const int num_kv = live.end - live.begin;
      KeyTile keys = {worker.local_keys, worker.local_values, false};
      if (access_ == KeyAccess::kLocal) {
        keys.has_nonfinite_value = PackKeys(tile, kv_begin, num_kv, worker.local_keys, worker.local_values);
      }
      VisitKeys(worker, tile, kv_begin, num_kv, live.mixed, keys);
    }
    if (num_chunks == 1) return StoreTile(worker, tile);
    float* partial = partial_of(head, chunk);
    const int rows = tile.num_rows();
    std::memcpy(partial, worker.acc, sizeof(float) * static_cast<size_t>(rows * value_stride_));
    std::memcpy(partial + max_rows * value_stride_, worker.row_max, sizeof(float) * static_cast<size_t>(rows));
    std::memcpy(partial + max_rows * (value_stride_ + 1), worker.row_sum, sizeof(float) * static_cast<size_t>(rows));
  });
  if (num_chunks == 1) return;
  ParallelFor(executor_, num_heads, [&](int64_t head, int worker_number) {
    Worker& worker = workers_[static_cast<size_t>(worker_number)];
    const RowTile tile = tile_of(head);
    const int rows = tile.num_rows();
    for (int row = 0; row < rows; ++row) {
      float row_max = kNegInf;
      for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
        row_max = std::max(row_max, partial_of(head, chunk)[max_rows * value_stride_ + row]);
      }
      float row_sum = 0.0f;
      float* acc = worker.acc + row * value_stride_;
      std::fill_n(acc, value_stride_, 0.0f);
      for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
        const float* partial = partial_of(head, chunk);
        const float chunk_max = partial[max_rows * value_stride_ + row];
        const float chunk_sum = partial[max_rows * (value_stride_ + 1) + row];
        if (chunk_max == kNegInf && chunk_sum == 0.0f) continue;  // nothing live; a NaN sum goes on
        const float weight = row_max == kNegInf ? 1.0f : std::exp(chunk_max - row_max);
        row_sum += weight * chunk_sum;
        for (int64_t c = 0; c < value_stride_; ++c) acc[c] += weight * partial[row * value_stride_ + c];
      }
      worker.row_max[row] = row_max;
      worker.row_sum[row] = row_sum;
    }
    StoreTile(worker, tile);
  });
}

// Copies the queries, with `scale` in them: the maximum of a row is taken after scaling, so any
// sign is right. bf16 pairs take the sign only, which is exact; the softmax applies the size.
void ForwardCall::BeginTile(Worker& worker, const RowTile& tile) const {
  const float scale = p_.ScaleOf(tile.outer);
  const int64_t row_stride = int64_t{p_.num_q_heads} * p_.head_dim;
  int row = 0;
  for (int head = tile.first_head; head < tile.first_head + tile.num_heads; ++head) {
    const int64_t begin = tile.q_begin * row_stride + int64_t{head} * p_.head_dim;
    if (uses_bf16_) {
      const uint16_t* src = p_.query.At<uint16_t>(tile.outer) + begin;
      const uint16_t sign = scale < 0.0f ? 0x8000 : 0;
      for (int q = 0; q < tile.num_live_q; ++q, ++row, src += row_stride) {
        auto* out = reinterpret_cast<uint16_t*>(static_cast<float*>(worker.query) + row * query_stride_);
        for (int c = 0; c < p_.head_dim; ++c) out[c] = static_cast<uint16_t>(src[c] ^ sign);
        if (p_.head_dim % 2) out[p_.head_dim] = 0;
      }
      continue;
    }
    PackArgs pack = {};
    pack.src = p_.query.Address(tile.outer, begin);
    pack.dtype = p_.query.dtype;
    pack.src_stride = row_stride;
    pack.num_rows = pack.padded_rows = tile.num_live_q;
    pack.num_columns = p_.head_dim;
    pack.scale = scale;
    pack.out = static_cast<float*>(worker.query) + row * query_stride_;
    pack.out_stride = query_stride_;
    isa_.pack_rows(pack);
    row += tile.num_live_q;
  }
  std::fill_n(worker.acc, tile.num_rows() * value_stride_, 0.0f);
  std::fill_n(worker.row_max, tile.num_rows(), kNegInf);
  std::fill_n(worker.row_sum, tile.num_rows(), 0.0f);
  if (worker.score) worker.score->BindCaptures(p_.CapturesOf(tile.outer));
  if (worker.mask) worker.mask->BindCaptures(p_.CapturesOf(tile.outer));
}

void ForwardCall::VisitKeys(Worker& worker, const RowTile& tile, int64_t kv_begin, int num_kv, unsigned mixed,
                            const KeyTile& keys) const {
  const int num_rows = tile.num_rows();
  if (mixed) {
    plan_.FillRows(KeyRect(tile, kv_begin, kv_begin + num_kv), mixed, worker.mask.get(), worker.rows);
    FillStrips(worker.rows, num_rows, isa_.strip_rows, worker.strips);
  }
  const TileRow* rows = mixed ? worker.rows : nullptr;
  if (access_ == KeyAccess::kInPlace) {
    const int64_t key_row = int64_t{p_.num_kv_heads} * p_.head_dim;
    const int64_t value_row = int64_t{p_.num_kv_heads} * p_.value_head_dim;
    DotArgs dot = {};
    dot.query = static_cast<const float*>(worker.query);
    dot.query_stride = query_stride_;
    dot.num_heads = tile.num_heads / p_.group_size();
    dot.num_rows = num_rows / dot.num_heads;
    dot.keys = p_.key.Address(tile.outer, kv_begin * key_row + int64_t{tile.kv_head} * p_.head_dim);
    dot.dtype = p_.key.dtype;
    dot.key_stride = key_row;
    dot.num_keys = num_kv;
    dot.head_dim = p_.head_dim;
    dot.scores = worker.scores;
    dot.score_stride = kTileColumns;
    isa_.dot_scores(dot);
    // A strip's range does not bind here: values are multiplied with whole rows of probabilities.
    if (mixed) {
      for (int row = 0; row < num_rows; ++row) {
        worker.rows[row].zero_begin = 0;
        worker.rows[row].zero_end = num_kv;
      }
    }
    Softmax(worker, tile, kv_begin, num_kv, rows);
    WeightedSumArgs sum = {};
    sum.probs = worker.scores;
    sum.prob_stride = kTileColumns;
    sum.num_heads = dot.num_heads;
    sum.num_rows = dot.num_rows;
    sum.values = p_.value.Address(tile.outer, kv_begin * value_row + int64_t{tile.kv_head} * p_.value_head_dim);
    sum.dtype = p_.value.dtype;
    sum.value_stride = value_row;
    sum.num_keys = num_kv;
    sum.value_head_dim = p_.value_head_dim;
    sum.acc = worker.acc;
    sum.acc_stride = value_stride_;
    sum.row_scale = worker.row_scale;
    sum.skips_zero = mixed != 0;
    isa_.weighted_sum(sum);
    return;
  }
  ScoreProduct(worker, num_rows, num_kv, mixed != 0, keys.key_panels);
  Softmax(worker, tile, kv_begin, num_kv, rows);
  if (mixed && keys.has_nonfinite_value) {
    ValueProductSkippingZeros(worker, num_rows, keys.values);
  } else {
    ValueProduct(worker, num_rows, num_kv, mixed != 0, keys);
  }
}

void ForwardCall::ScoreProduct(Worker& worker, int num_rows, int num_kv, bool is_mixed, const void* key_panels) const {
  GemmArgs g = {};
  g.a = worker.query;
  g.a_stride = query_stride_;
  g.b = key_panels;
  g.b_stride = isa_.panel_width;
  g.b_panel_stride = int64_t{isa_.panel_width} * key_depth_;
  g.c = worker.scores;
  g.c_stride = kTileColumns;
  g.num_rows = num_rows;
  g.depth = key_depth_;
  KeyLaneProduct(isa_, uses_bf16_ ? isa_.gemm_bf16[kGemmOverwrite] : isa_.gemm_rows[kGemmOverwrite], g,
                 is_mixed ? worker.strips : nullptr, num_kv);
}

// Bias and score program, then the softmax.
void ForwardCall::Softmax(Worker& worker, const RowTile& tile, int64_t kv_begin, int num_kv,
                          const TileRow* rows) const {
  SoftmaxArgs s = {};
  s.scores = worker.scores;
  s.score_stride = kTileColumns;
  s.probs = worker.probs;
  s.prob_stride = kTileColumns;
  s.num_rows = tile.num_rows();
  s.num_lanes = num_kv;
  s.rows = rows;
  s.row_max = worker.row_max;
  s.row_sum = worker.row_sum;
  s.row_scale = worker.row_scale;
  const float left_scale = uses_bf16_ ? std::fabs(p_.ScaleOf(tile.outer)) : 1.0f;
  const auto softmax = uses_bf16_ ? isa_.softmax_rows_bf16 : isa_.softmax_rows;
  if (!has_row_steps_) {
    s.score_scale = left_scale;
    softmax(s);
    return;
  }
  s.score_scale = 1.0f;
  s.num_rows = 1;
  int row = 0;
  for (int head = tile.first_head; head < tile.first_head + tile.num_heads; ++head) {
    if (worker.score) worker.score->BindHead(p_.GlobalBatch(tile.outer), p_.GlobalHead(tile.outer, head));
    for (int q = 0; q < tile.num_live_q; ++q, ++row) {
      s.rows = rows ? rows + row : nullptr;
      s.scores = RowSteps(worker, tile.outer, head, tile.q_begin + q, kv_begin, rows ? s.rows->begin : 0,
                          rows ? s.rows->end : num_kv, left_scale, worker.scores + row * kTileColumns);
      s.probs = static_cast<char*>(worker.probs) + row * kTileColumns * (uses_bf16_ ? 2 : 4);
      s.row_max = worker.row_max + row;
      s.row_sum = worker.row_sum + row;
      s.row_scale = worker.row_scale + row;
      softmax(s);
    }
  }
}

// Bias and score program on the columns [begin, end) of one row; returns where the row is
// afterwards.
const float* ForwardCall::RowSteps(Worker& worker, int64_t outer, int head, int64_t q, int64_t kv_begin, int begin,
                                   int end, float left_scale, float* scores) const {
  if (begin >= end) return scores;
  float* live = scores + begin;
  if (p_.bias) {
    const BroadcastStrides& strides = p_.bias_strides;
    const int64_t first = head * strides.head + q * strides.row + (kv_begin + begin) * strides.column;
    isa_.add_bias(live, left_scale, p_.bias.Address(outer, first), p_.bias.dtype, static_cast<int>(strides.column),
                  end - begin);
  } else if (left_scale != 1.0f) {
    const float zero = 0.0f;
    isa_.add_bias(live, left_scale, &zero, DType::kF32, 0, end - begin);
  }
  if (!worker.score) return scores;
  worker.score->BindRow(static_cast<int32_t>(p_.GlobalQuery(outer, q)));
  const auto kv_idx0 = static_cast<int32_t>(p_.GlobalKey(outer, kv_begin + begin));
  return worker.score->RunScore(live, kv_idx0, end - begin) - begin;
}

// acc = row_scale * acc + P V.
void ForwardCall::ValueProduct(Worker& worker, int num_rows, int num_kv, bool is_mixed, const KeyTile& keys) const {
  GemmArgs g = {};
  g.a = worker.probs;
  g.a_stride = kTileColumns / keys_per_step_;
  g.b = keys.values;
  g.b_stride = value_stride_;
  g.b_panel_stride = isa_.panel_width;
  g.c = worker.acc;
  g.c_stride = value_stride_;
  g.row_scale = worker.row_scale;
  g.num_rows = num_rows;
  g.num_vectors = static_cast<int>(value_stride_) / isa_.vector_width;
  KeySumProduct(isa_, uses_bf16_ ? isa_.gemm_bf16[kGemmScaleAdd] : isa_.gemm_rows[kGemmScaleAdd], g,
                is_mixed ? worker.strips : nullptr, num_kv, keys_per_step_);
}

// The same where a value is NaN or infinite: a dead key's probability 0 must not meet it.
void ForwardCall::ValueProductSkippingZeros(Worker& worker, int num_rows, const void* values) const {
  const auto widen = [](uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  };
  for (int row = 0; row < num_rows; ++row) {
    float* acc = worker.acc + row * value_stride_;
    const TileRow& live = worker.rows[row];
    for (int64_t c = 0; c < value_stride_; ++c) acc[c] *= worker.row_scale[row];
    for (int key = live.begin; key < live.end; ++key) {
      if (!(live.bits[key / 32] >> (key % 32) & 1)) continue;
      if (uses_bf16_) {
        const float prob = widen(uint32_t{static_cast<const uint16_t*>(worker.probs)[row * kTileColumns + key]} << 16);
        const uint32_t* pairs = static_cast<const uint32_t*>(values) + key / 2 * value_stride_;
        for (int64_t c = 0; c < value_stride_; ++c) {
          acc[c] += prob * widen(key % 2 ? pairs[c] & 0xffff0000u : pairs[c] << 16);
        }
      } else {
        const float prob = static_cast<const float*>(worker.probs)[row * kTileColumns + key];
        const float* value = static_cast<const float*>(values) + key * value_stride_;
        for (int64_t c = 0; c < value_stride_; ++c) acc[c] += prob * value[c];
      }
    }
  }
}

// Divides by the sum, with the sink's share in it, and writes out and the LSE; dead rows get 0 and
// -inf.
void ForwardCall::StoreTile(Worker& worker, const RowTile& tile) const {
  const int64_t out_row = int64_t{p_.num_q_heads} * p_.value_head_dim;
  int row = 0;
  for (int head = tile.first_head; head < tile.first_head + tile.num_heads; ++head) {
    const float sink = p_.sinks ? p_.sinks.At<float>(tile.outer)[head] : kNegInf;
    for (int q = 0; q < tile.num_q; ++q) {
      const int64_t q_local = tile.q_begin + q;
      if (q >= tile.num_live_q) {
        StoreZeroRow(tile.outer, q_local * out_row + int64_t{head} * p_.value_head_dim);
        *static_cast<float*>(results_.lse.Address(tile.outer, head * p_.q_seq_len + q_local)) = kNegInf;
        continue;
      }
      float row_max = worker.row_max[row], row_sum = worker.row_sum[row], weight = 1.0f;
      const bool is_dead = row_sum == 0.0f;  // a NaN sum is not: it makes the row NaN
      if (p_.sinks && !(sink == kNegInf)) {
        const float total_max = sink > row_max ? sink : row_max;
        if (!is_dead && row_max != kNegInf) weight = std::exp(row_max - total_max);
        row_sum = weight * row_sum + std::exp(sink - total_max);
        row_max = total_max;
      }
      const int64_t lse_index = head * p_.q_seq_len + q_local;
      float* lse = static_cast<float*>(results_.lse.Address(tile.outer, lse_index));
      *lse = row_sum == 0.0f ? kNegInf : row_max + std::log(row_sum);
      if (row_sum != row_sum) *lse = row_sum;
      const int64_t out_index = q_local * out_row + int64_t{head} * p_.value_head_dim;
      if (is_dead) {  // not 0 * acc: a NaN value may have met its probability 0
        StoreZeroRow(tile.outer, out_index);
      } else {
        isa_.store_row(results_.out.Address(tile.outer, out_index), results_.out.dtype,
                       worker.acc + row * value_stride_, weight / row_sum, p_.value_head_dim);
      }
      ++row;
    }
  }
}

void ForwardCall::StoreZeroRow(int64_t outer, int64_t out_index) const {
  std::memset(results_.out.Address(outer, out_index), 0,
              static_cast<size_t>(p_.value_head_dim) * static_cast<size_t>(SizeOf(results_.out.dtype)));
}

}  // namespace

void AttentionForward(const AttentionProblem& problem, const ForwardResults& results, const Executor& executor) {
  if (problem.num_outer() == 0 || problem.q_seq_len == 0 || problem.num_q_heads == 0) return;
  ForwardCall(problem, results, executor).Run();
}

}  // namespace fkl
