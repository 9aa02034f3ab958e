// The address maps of fkl_jax/device/tile/layout.cuh, checked by a host compiler:
//   g++ -std=c++17 -Ifkl_jax/device tests/device/layout_test.cc && ./a.out
// Every fragment load is emulated from the lane addresses and must deliver the element that mma.sync expects, and the
// eight rows of each ldmatrix phase must fall into eight bank groups.
#include "tile/layout.cuh"

#include <cstdio>
#include <cstdlib>
#include <set>
#include <vector>

namespace {

using fkl::TilePlace;

void Check(bool ok, const char* what, int columns, int lane) {
  if (ok) return;
  std::printf("wrong: %s, %d columns, lane %d\n", what, columns, lane);
  std::exit(1);
}

// A tile whose element (row, column) is row * 1000 + column.
template <class Tile>
std::vector<int> Fill() {
  std::vector<int> bytes(Tile::kBytes, -1);
  const int size = sizeof(typename Tile::Element);
  for (int row = 0; row < Tile::kRows; ++row)
    for (int column = 0; column < Tile::kColumns; ++column) {
      int& place = bytes[Tile::element_offset(row, column)];
      Check(place == -1, "two elements in one place", Tile::kColumns, 0);
      Check(Tile::element_offset(row, column) % size == 0, "alignment", Tile::kColumns, 0);
      place = row * 1000 + column;
    }
  return bytes;
}

template <class Tile>
void CheckLdmatrix(bool is_rows_first) {
  const std::vector<int> tile = Fill<Tile>();
  const int size = sizeof(typename Tile::Element), per_chunk = Tile::kChunkElements;
  for (int row = 0; row + 16 <= Tile::kRows; row += 16)
    for (int chunk = 0; chunk + 2 <= Tile::kChunks; chunk += 2) {
      unsigned address[32];
      for (int lane = 0; lane < 32; ++lane) {
        const TilePlace place =
            is_rows_first ? fkl::rows_first_place(lane) : fkl::chunks_first_place(lane);
        address[lane] = Tile::advance(static_cast<unsigned>(Tile::chunk_offset(place)), row, chunk);
      }
      for (int matrix = 0; matrix < 4; ++matrix) {
        const int first_row = row + 8 * (is_rows_first ? matrix % 2 : matrix / 2);
        const int first_chunk = chunk + (is_rows_first ? matrix / 2 : matrix % 2);
        std::set<unsigned> banks;
        for (int r = 0; r < 8; ++r) {
          const unsigned at = address[8 * matrix + r];
          banks.insert(at / 16 % 8);
          for (int e = 0; e < per_chunk; ++e)
            Check(tile[at + e * size] == (first_row + r) * 1000 + first_chunk * per_chunk + e,
                  "ldmatrix", Tile::kColumns, 8 * matrix + r);
        }
        Check(banks.size() == 8, "bank conflict", Tile::kColumns, 8 * matrix);
      }
    }
}

// Float operands that ldmatrix cannot transpose: element loads from two bases per lane.
template <class Tile>
void CheckFloatTrans() {
  const std::vector<int> tile = Fill<Tile>();
  for (int k = 0; k + 8 <= Tile::kRows; k += 8)
    for (int n = 0; n + 8 <= Tile::kColumns; n += 8)
      for (int half = 0; half < 2; ++half) {
        std::set<unsigned> banks;
        for (int lane = 0; lane < 32; ++lane) {
          const int g = lane / 4, t = lane % 4;
          const unsigned base = static_cast<unsigned>(Tile::element_offset(2 * t + half, g));
          const unsigned at = Tile::advance(base, k, n / 4);
          Check(tile[at] == (k + 2 * t + half) * 1000 + n + g, "float trans", Tile::kColumns, lane);
          banks.insert(at / 4 % 32);
        }
        if (Tile::kColumns % 32 == 0)
          Check(banks.size() == 32, "float trans bank conflict", Tile::kColumns, 0);
      }
}

template <int kColumns>
void CheckColumns() {
  using Tile16 = fkl::TileLayout<fkl::BFloat16, 64, kColumns>;
  using Tile32 = fkl::TileLayout<float, 32, kColumns>;
  CheckLdmatrix<Tile16>(true);
  CheckLdmatrix<Tile16>(false);
  CheckLdmatrix<Tile32>(true);
  CheckLdmatrix<Tile32>(false);
  CheckFloatTrans<Tile32>();
  if constexpr (kColumns > 16) CheckColumns<kColumns - 16>();
}

}  // namespace

int main() {
  CheckColumns<256>();
  std::puts("layout: ok");
  return 0;
}
