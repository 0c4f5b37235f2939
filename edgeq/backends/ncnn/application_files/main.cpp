// Run the self-test of the model, and print PASS or FAIL.

#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "model.h"

// Copy values into a Mat. Each channel of a Mat begins at an aligned address.
static ncnn::Mat make_mat(const edgeq::Port& port, const float* values) {
  ncnn::Mat mat;
  const int* s = port.sizes;
  if (port.axes == 1) mat.create(s[0]);
  if (port.axes == 2) mat.create(s[1], s[0]);
  if (port.axes == 3) mat.create(s[2], s[1], s[0]);
  if (port.axes == 4) mat.create(s[3], s[2], s[1], s[0]);
  const size_t count = port.count() / mat.c;
  for (int c = 0; c < mat.c; ++c) {
    float* begin = mat.channel(c);
    std::memcpy(begin, values + c * count, count * sizeof(float));
  }
  return mat;
}

// Return the values of a Mat without the gaps between its channels.
static std::vector<float> read_mat(const ncnn::Mat& mat) {
  std::vector<float> values;
  const size_t count = static_cast<size_t>(mat.w) * mat.h * mat.d;
  for (int c = 0; c < mat.c; ++c) {
    const float* begin = mat.channel(c);
    values.insert(values.end(), begin, begin + count);
  }
  return values;
}

static int fail(const char* what) {
  std::printf("FAIL: %s\n", what);
  return 1;
}

int main(int count, char** arguments) {
  ncnn::Net net;
  edgeq::configure(net.opt, count > 1 ? std::atoi(arguments[1]) : 1);
  if (net.load_param("model.param") || net.load_model("model.bin")) return fail("the model cannot be loaded");
  std::FILE* file = std::fopen("selftest.bin", "rb");
  if (!file) return fail("selftest.bin is not here");
  double largest = 0;
  for (int number = 0; number < edgeq::kCases; ++number) {
    ncnn::Extractor extractor = net.create_extractor();
    for (const edgeq::Port& port : edgeq::kInputs) {
      std::vector<float> values(port.count());
      if (std::fread(values.data(), sizeof(float), values.size(), file) != values.size()) return fail("a short file");
      if (extractor.input(port.blob, make_mat(port, values.data()))) return fail("an input is refused");
    }
    for (const edgeq::Port& port : edgeq::kOutputs) {
      std::vector<float> expected(port.count());
      if (std::fread(expected.data(), sizeof(float), expected.size(), file) != expected.size())
        return fail("a short file");
      ncnn::Mat mat;
      if (extractor.extract(port.blob, mat)) return fail("an output is missing");
      const std::vector<float> values = read_mat(mat);
      if (values.size() != expected.size()) return fail("an output has another size");
      float scale = 0;
      for (float value : expected) scale = std::fmax(scale, std::fabs(value));
      for (size_t i = 0; i < values.size(); ++i)
        // A comparison with NaN is false, so NaN also fails.
        if (!(std::fabs(values[i] - expected[i]) <= edgeq::kTolerance * scale)) return fail("an output differs");
        else largest = std::fmax(largest, std::fabs(values[i] - expected[i]));
    }
  }
  std::fclose(file);
  std::printf("PASS: %d cases, largest difference %g\n", edgeq::kCases, largest);
  return 0;
}
