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

// What to draft: a tree of K branches of L2 tokens below a trunk of L1; or, where K is 0, a lookup of L1 tokens.
struct Action {
  int64_t K, L1, L2;
};

class Selector {
 public:
  explicit Selector(const std::string& package) : loader_(package) {}

  // The action of each root.
  //   scalars: float32 [B, F] in the order of config.json; zeros for what only the draft's pass of the root would tell.
  //   passed: whether the draft has passed the root. Ask first without; where the answer is a tree that is not empty,
  //     let the draft pass the root and ask again, if `feature_levels` in config.json has more than the early features.
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
