// Load the model from the assets of an Android application. Put model.param and model.bin into app/src/main/assets.

#include <android/asset_manager.h>

#include "model.h"

namespace edgeq {

// Return whether the model was loaded. The options must be set before that.
bool load(ncnn::Net& net, AAssetManager* assets, int threads) {
  configure(net.opt, threads);
  return net.load_param(assets, "model.param") == 0 && net.load_model(assets, "model.bin") == 0;
}

}  // namespace edgeq
