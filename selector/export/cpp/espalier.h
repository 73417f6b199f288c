// A compiled selector (`selector.pt2`) in C++, over libtorch.
//
//     espalier::Selector selector("runs/demo/selector/selector.pt2");
//     espalier::Action action = selector.decide(scalars, /*passed=*/true)[0];
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

namespace espalier {

// A tree of K branches of L2 tokens below a trunk of L1 tokens, or a lookup of L1 tokens if K is 0.
struct Action {
  int64_t K, L1, L2;
};

class Selector {
 public:
  explicit Selector(const std::string& package) : loader_(package) {}

  // The action of each root.
  //   scalars: float32 [B, F] in the order of config.json; zeros for those that are not known.
  //   passed: whether the draft has passed the root. If the mode's `feature_levels` in config.json has two levels,
  //     first decide without the pass. If the answer is a tree that is not empty, let the draft pass the root and
  //     decide again.
  //   hidden: float32 [B, D] each, for a selector with full features.
  std::vector<Action> decide(const at::Tensor& scalars, bool passed, std::vector<at::Tensor> hidden = {}) {
    std::vector<at::Tensor> inputs = {scalars, at::full({scalars.size(0)}, passed ? 1.0f : 0.0f)};
    inputs.insert(inputs.end(), hidden.begin(), hidden.end());
    const at::Tensor shapes = loader_.run(inputs)[0].contiguous();
    std::vector<Action> actions;
    for (int64_t b = 0; b < shapes.size(0); ++b) {
      const int64_t* shape = shapes.data_ptr<int64_t>() + 3 * b;
      actions.push_back({shape[0], shape[1], shape[2]});
    }
    return actions;
  }

 private:
  torch::inductor::AOTIModelPackageLoader loader_;
};

}  // namespace espalier
