// As much of ncnn's interface as main.cpp uses. The network answers what selftest.bin expects, or WRONG_BY more, if its
// inputs are those of the file.
#pragma once
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace ncnn {
struct Option {
  int num_threads = 8;
@OPTIONS@
};
class Mat {
 public:
  int dims = 0, w = 0, h = 0, d = 0, c = 0;
  void create(int w_) { make(1, w_, 1, 1, 1); }
  void create(int w_, int h_) { make(2, w_, h_, 1, 1); }
  void create(int w_, int h_, int c_) { make(3, w_, h_, 1, c_); }
  void create(int w_, int h_, int d_, int c_) { make(4, w_, h_, d_, c_); }
  float* channel(int at) { return data_->data() + at * step_; }
  const float* channel(int at) const { return data_->data() + at * step_; }

 private:
  void make(int dims_, int w_, int h_, int d_, int c_) {
    dims = dims_, w = w_, h = h_, d = d_, c = c_;
    step_ = static_cast<size_t>(w) * h * d + 3;  // a gap between channels
    data_ = std::make_shared<std::vector<float>>(step_ * c, -1e30f);
  }
  size_t step_ = 0;
  std::shared_ptr<std::vector<float>> data_;
};
// The values of selftest.bin, in the order in which the program reads and compares them.
inline std::FILE* recorded() {
  static std::FILE* file = std::fopen("selftest.bin", "rb");
  return file;
}
class Extractor {
 public:
  int input(const char* blob, const Mat& mat) {
    if (std::string(blob) != "@INPUT@" || mat.dims != @DIMS@) return -1;
    for (int c = 0; c < mat.c; ++c)
      for (int i = 0; i < mat.w * mat.h * mat.d; ++i) {
        float value;
        if (std::fread(&value, 4, 1, recorded()) != 1 || value != mat.channel(c)[i]) return -1;
      }
    return 0;
  }
  int extract(const char* blob, Mat& mat) {
    if (std::string(blob) != "@OUTPUT@") return -1;
    mat.create(@SIZE@);
    for (int i = 0; i < mat.w; ++i) {
      if (std::fread(mat.channel(0) + i, 4, 1, recorded()) != 1) return -1;
      mat.channel(0)[i] += WRONG_BY;
    }
    return 0;
  }
};
class Net {
 public:
  Option opt;
  template <typename... Place>
  int load_param(Place...) {
    // Options count only if they are set before this.
    return opt.num_threads == 1 && !opt.use_fp16_storage && !opt.use_fp16_arithmetic ? 0 : -1;
  }
  template <typename... Place>
  int load_model(Place...) {
    return 0;
  }
  Extractor create_extractor() { return {}; }
};
}  // namespace ncnn
