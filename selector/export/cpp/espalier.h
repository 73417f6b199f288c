// A compiled selector (`selector.pt2`) in C++, over libtorch.
//
//     espalier::Selector selector("runs/demo/selector/selector.pt2");
//     espalier::Action action = selector.decide(scalars, /*passed=*/true)[0];
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
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
  // Throws std::invalid_argument where the package does not say how wide its inputs are.
  explicit Selector(const std::string& package) : loader_(package) {
    auto known = loader_.get_metadata();
    std::istringstream widths(known["widths"]), early(known["early"]);
    for (int64_t width; widths >> width;) widths_.push_back(width);
    if (!(early >> early_) || widths_.empty()) throw std::invalid_argument(package + ": export the selector again");
  }

  // The action of each root.
  //   scalars: float32 [B, F] in the order of config.json. Before the pass of the draft, the early ones alone,
  //     [B, `features.early`], or all of them with zeros for the others.
  //   passed: whether the draft has passed the root. If the mode's `feature_levels` in config.json has two levels,
  //     first decide without the pass. If the answer is a tree that is not empty, let the draft pass the root and
  //     decide again.
  //   hidden: float32 [B, D] each, for a selector with full features; may be left out before the pass.
  // Throws std::invalid_argument where a tensor has another shape or dtype, is not on the CPU, or is not finite.
  std::vector<Action> decide(at::Tensor scalars, bool passed, std::vector<at::Tensor> hidden = {}) {
    if (scalars.dim() == 0) throw std::invalid_argument("scalars: a number; float32 [B, F] is needed");
    const int64_t roots = scalars.size(0);
    if (roots == 0) return {};
    const bool early = !passed && scalars.size(-1) != widths_[0];
    check(scalars, "scalars", roots, early ? early_ : widths_[0]);
    if (early) scalars = at::constant_pad_nd(scalars, {0, widths_[0] - early_});
    if (!passed && hidden.empty())
      for (size_t i = 1; i < widths_.size(); ++i) hidden.push_back(at::zeros({roots, widths_[i]}));
    if (hidden.size() + 1 != widths_.size())
      throw std::invalid_argument(std::to_string(hidden.size()) + " hidden states are given; the selector reads " +
                                  std::to_string(widths_.size() - 1));
    std::vector<at::Tensor> inputs = {scalars.contiguous(), at::full({roots}, passed ? 1.0f : 0.0f)};
    for (size_t i = 0; i < hidden.size(); ++i) {
      check(hidden[i], "hidden state " + std::to_string(i), roots, widths_[i + 1]);
      inputs.push_back(hidden[i].contiguous());
    }
    const at::Tensor shapes = loader_.run(inputs)[0].contiguous();
    std::vector<Action> actions;
    for (int64_t b = 0; b < roots; ++b) {
      const int64_t* shape = shapes.data_ptr<int64_t>() + 3 * b;
      actions.push_back({shape[0], shape[1], shape[2]});
    }
    return actions;
  }

 private:
  // The compiled code would read past the end of a narrower tensor.
  static void check(const at::Tensor& given, const std::string& name, int64_t roots, int64_t width) {
    if (given.scalar_type() != at::kFloat || !given.is_cpu() || given.sizes() != at::IntArrayRef({roots, width})) {
      std::ostringstream message;
      message << name << ": " << given.toString() << " " << given.sizes() << "; float32 [" << roots << ", " << width
              << "] on the CPU is needed";
      throw std::invalid_argument(message.str());
    }
    if (!at::isfinite(given).all().item<bool>()) throw std::invalid_argument(name + ": a number is not finite");
  }

  torch::inductor::AOTIModelPackageLoader loader_;
  int64_t early_ = 0;
  std::vector<int64_t> widths_;  // of the scalars and the hidden states
};

}  // namespace espalier
