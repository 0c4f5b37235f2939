// Runs the model in TFLite Micro on the inputs of selftest.cc. Prints PASS, or FAIL with the difference.
//
// Build it with TFLite Micro's sources and its library, see README.md. Exit status 0 means PASS.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "model.h"
#include "operators.h"
#include "selftest.h"
#include "tensorflow/lite/micro/micro_interpreter.h"
#include "tensorflow/lite/micro/micro_log.h"
#include "tensorflow/lite/micro/system_setup.h"
#include "tensorflow/lite/schema/schema_generated.h"

// The interpreter is in one of these namespaces, depending on the version of TFLite Micro.
namespace tflite {
namespace micro {}
}  // namespace tflite
using namespace tflite;
using namespace tflite::micro;

// Largest allowed difference of an output, in steps of its integers. The expected outputs are those of TFLite Micro's
// portable kernels. Other kernels, or an NPU, may round differently: raise this only if you know that they do.
#ifndef EDGEQ_ALLOWED_STEPS
#define EDGEQ_ALLOWED_STEPS 0
#endif

namespace {

alignas(16) uint8_t arena[kEdgeqArenaBytes];

constexpr float kAllowedShare = 1e-4f;

// Returns the largest difference from an expected output, divided by the allowed one. More than 1 fails.
float Difference(const TfLiteTensor* found, const EdgeqTensor& expected) {
  float worst = 0.0f;
  if (found->bytes != expected.bytes) return INFINITY;
  if (found->type == kTfLiteFloat32) {
    const float* values = found->data.f;
    for (size_t i = 0; i < found->bytes / sizeof(float); ++i) {
      float right;
      std::memcpy(&right, expected.data + i * sizeof(float), sizeof(float));
      worst = std::fmax(worst, std::fabs(values[i] - right) / (kAllowedShare * (1.0f + std::fabs(right))));
    }
    return worst;
  }
  const int8_t* values = found->data.int8;
  int steps = 0;
  for (size_t i = 0; i < found->bytes; ++i) {
    const int apart = values[i] - static_cast<int8_t>(expected.data[i]);
    steps = apart > steps ? apart : -apart > steps ? -apart : steps;
  }
  return steps <= EDGEQ_ALLOWED_STEPS ? 0.0f : static_cast<float>(steps) / (EDGEQ_ALLOWED_STEPS + 0.5f);
}

int Fail(const char* what) {
  MicroPrintf("FAIL: %s", what);
  return 1;
}

}  // namespace

int main() {
  InitializeTarget();
  EdgeqResolver resolver;
  if (EdgeqRegister(resolver) != kTfLiteOk) return Fail("an operator is not registered");
  MicroInterpreter interpreter(GetModel(kEdgeqModel), resolver, arena, sizeof(arena));
  if (interpreter.AllocateTensors() != kTfLiteOk) return Fail("the arena is too small, or an operator is missing");
  MicroPrintf("arena: %d of %d bytes", static_cast<int>(interpreter.arena_used_bytes()), static_cast<int>(sizeof(arena)));
  if (interpreter.inputs_size() != kEdgeqInputs || interpreter.outputs_size() != kEdgeqOutputs) {
    return Fail("the model has other inputs or outputs");
  }
  for (int number = 0; number < kEdgeqCases; ++number) {
    const EdgeqCase& one = kEdgeqSelfTest[number];
    for (size_t i = 0; i < kEdgeqInputs; ++i) {
      TfLiteTensor* input = interpreter.input(i);
      if (input->bytes != one.inputs[i].bytes) return Fail("an input has another size");
      std::memcpy(input->data.raw, one.inputs[i].data, input->bytes);
    }
    if (interpreter.Invoke() != kTfLiteOk) return Fail("the model does not run");
    for (size_t i = 0; i < kEdgeqOutputs; ++i) {
      if (Difference(interpreter.output(i), one.outputs[i]) > 1.0f) {
        MicroPrintf("FAIL: case %d, output %d differs", number, static_cast<int>(i));
        return 1;
      }
    }
  }
  MicroPrintf("PASS: %d cases", kEdgeqCases);
  return 0;
}
