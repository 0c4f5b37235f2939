// Load the model from its flash partition, run its self-test, and time it. The lines that begin with EDGEQ are for
// `edgeq verify BUNDLE --log FILE`.
#include <cstdio>

#include "dl_model_base.hpp"
#include "edgeq_model.h"
#include "esp_err.h"
#include "esp_timer.h"

extern "C" void app_main(void)
{
    printf("EDGEQ start file=%s chip=%s\n", kEdgeqFile, kEdgeqChip);
    auto *model = new dl::Model("model",
                                fbs::MODEL_LOCATION_IN_FLASH_PARTITION,
                                kEdgeqInternalBytes,
                                dl::MEMORY_MANAGER_GREEDY,
                                nullptr,
                                kEdgeqCopyWeights);
    model->profile_memory();
    // The runtime compares every tensor that the file states, and names the first that differs.
    const bool passed = model->test() == ESP_OK;
    const int64_t begin = esp_timer_get_time();
    for (int run = 0; run < kEdgeqRuns; run++) {
        model->run();
    }
    const int64_t microseconds = (esp_timer_get_time() - begin) / kEdgeqRuns;
    printf("EDGEQ end passed=%d microseconds=%lld\n", passed ? 1 : 0, static_cast<long long>(microseconds));
}
