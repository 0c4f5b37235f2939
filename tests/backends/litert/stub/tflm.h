// As much of TFLite Micro's interface as main.cc uses: it answers what the self-test expects, or WRONG_BY steps more.
// In one namespace or in two, as releases of TFLite Micro differ in.
#pragma once
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "model.h"
#include "selftest.h"

namespace tflite {
struct Model {
  const void* bytes;
};
#ifdef NESTED
namespace micro {
#endif
enum TfLiteStatus { kTfLiteOk, kTfLiteError };
enum TfLiteType { kTfLiteFloat32, kTfLiteInt8 };
struct TfLiteTensor {
  union {
    char* raw;
    int8_t* int8;
    float* f;
  } data;
  size_t bytes;
  TfLiteType type;
};
inline void InitializeTarget() {}
inline void MicroPrintf(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vprintf(format, arguments);
  va_end(arguments);
  std::printf("\n");
}
template <unsigned int Count>
struct MicroMutableOpResolver {
  unsigned int added = 0;
  TfLiteStatus Add() { return ++added <= Count ? kTfLiteOk : kTfLiteError; }
@METHODS@};
class MicroInterpreter {
 public:
  template <typename Resolver>
  MicroInterpreter(const Model* model, const Resolver&, uint8_t* arena, size_t bytes)
      : sound_(reinterpret_cast<uintptr_t>(model->bytes) % 16 == 0 && reinterpret_cast<uintptr_t>(arena) % 16 == 0),
        bytes_(bytes) {}
  TfLiteStatus AllocateTensors() {
    if (!sound_) return kTfLiteError;
    for (size_t i = 0; i < kEdgeqInputs; ++i) Hold(inputs_[i], kEdgeqSelfTest[0].inputs[i].bytes);
    for (size_t i = 0; i < kEdgeqOutputs; ++i) Hold(outputs_[i], kEdgeqSelfTest[0].outputs[i].bytes);
    return kTfLiteOk;
  }
  size_t arena_used_bytes() const { return bytes_; }
  size_t inputs_size() const { return kEdgeqInputs; }
  size_t outputs_size() const { return kEdgeqOutputs; }
  TfLiteTensor* input(size_t place) { return &inputs_[place]; }
  TfLiteTensor* output(size_t place) { return &outputs_[place]; }
  TfLiteStatus Invoke() {
    for (const EdgeqCase& one : kEdgeqSelfTest) {
      if (std::memcmp(inputs_[0].data.raw, one.inputs[0].data, inputs_[0].bytes) != 0) continue;
      for (size_t i = 0; i < kEdgeqOutputs; ++i) {
        std::memcpy(outputs_[i].data.raw, one.outputs[i].data, outputs_[i].bytes);
        outputs_[i].data.int8[0] += outputs_[i].data.int8[0] > 0 ? -WRONG_BY : WRONG_BY;
      }
      return kTfLiteOk;
    }
    return kTfLiteError;
  }

 private:
  static void Hold(TfLiteTensor& tensor, size_t bytes) {
    tensor.data.raw = new char[bytes];
    tensor.bytes = bytes;
    tensor.type = kTfLiteInt8;
  }
  bool sound_;
  size_t bytes_;
  TfLiteTensor inputs_[kEdgeqInputs], outputs_[kEdgeqOutputs];
};
#ifdef NESTED
}  // namespace micro
#endif
inline const Model* GetModel(const void* bytes) {
  static Model model;
  model.bytes = bytes;
  return &model;
}
}  // namespace tflite
#ifndef NESTED
using tflite::kTfLiteError;
using tflite::kTfLiteFloat32;
using tflite::kTfLiteInt8;
using tflite::kTfLiteOk;
using tflite::TfLiteStatus;
using tflite::TfLiteTensor;
#endif
