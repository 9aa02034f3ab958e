// SHA-256 (FIPS 180-4): names of cache entries and their checksums.
#ifndef FKL_FFI_CUDA_SHA256_H_
#define FKL_FFI_CUDA_SHA256_H_

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace fkl::cuda {

class Sha256 {
 public:
  Sha256& Add(std::string_view bytes);
  // The bytes preceded by their number, so that neighbouring fields cannot flow into each other.
  Sha256& AddField(std::string_view bytes);
  // 64 hexadecimal digits; nothing may be added afterwards.
  std::string Finish();

 private:
  void Block(const unsigned char* block);

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<unsigned char, 64> pending_ = {};
  uint64_t num_bytes_ = 0;
};

}  // namespace fkl::cuda

#endif  // FKL_FFI_CUDA_SHA256_H_
