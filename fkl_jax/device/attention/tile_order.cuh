// In which order the query tiles of a call are worked on.
//
// The last query tiles come first (under a causal mask they have the most keys, and short ones at the end balance), all
// heads of a section before the next tile, so that the keys and values of a section stay in L2 while its query tiles go
// by.
#ifndef FKL_DEVICE_ATTENTION_TILE_ORDER_CUH_
#define FKL_DEVICE_ATTENTION_TILE_ORDER_CUH_

#include "attention/params.cuh"
#include "core/types.cuh"

namespace fkl {

struct QueryTileIndex {
  int head;
  int tile;
  long long outer;
};

template <class Element>
struct QueryTileOrder {
  static constexpr long long kSectionBytes = 32ll << 20;

  FKL_DEVICE QueryTileOrder(const CommonParams& params, int q_tile) : num_q_heads_(params.num_q_heads) {
    num_tiles_ = ceil_div(params.q_seq_len, q_tile);
    num_rows_ = static_cast<int>(params.num_outer) * params.num_q_heads;
    const int group = params.num_q_heads / params.num_kv_heads;
    const long long head_bytes = static_cast<long long>(params.kv_seq_len) * (params.head_dim + params.value_head_dim) *
                                 static_cast<int>(sizeof(Element));
    const long long num_kv_heads = kSectionBytes / (head_bytes + 1) + 1;
    section_rows_ = static_cast<int>(num_kv_heads * group < num_rows_ ? num_kv_heads * group : num_rows_);
  }

  FKL_DEVICE int size() const { return num_tiles_ * num_rows_; }

  FKL_DEVICE QueryTileIndex at(int index) const {
    const int section = index / (section_rows_ * num_tiles_);
    const int first_row = section * section_rows_;
    const int rows = min_int(section_rows_, num_rows_ - first_row);
    const int rest = index - first_row * num_tiles_;
    const int row = first_row + rest % rows;
    QueryTileIndex result;
    result.tile = num_tiles_ - 1 - rest / rows;
    result.head = row % num_q_heads_;
    result.outer = row / num_q_heads_;
    return result;
  }

 private:
  int num_q_heads_, num_tiles_;
  int num_rows_;  // heads of all outer elements
  int section_rows_;
};

}  // namespace fkl

#endif  // FKL_DEVICE_ATTENTION_TILE_ORDER_CUH_
