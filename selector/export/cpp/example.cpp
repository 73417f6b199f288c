// Reads the scalars of one root per line from standard input, and prints the action at each root.
//
//     T=$(python -c "import torch; print(torch.__path__[0])")
//     g++ -std=c++20 example.cpp -I$T/include -I$T/include/torch/csrc/api/include \
//       -L$T/lib -Wl,-rpath,$T/lib -ltorch -ltorch_cpu -lc10 -o example
//     ./example selector.pt2 passed < scalars.txt
#include <cstdlib>
#include <iostream>
#include <sstream>

#include "espalier.h"

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "example PACKAGE early|passed < SCALARS\n";
    return 2;
  }
  std::vector<float> values;
  int64_t roots = 0;
  for (std::string line; std::getline(std::cin, line); ++roots) {
    std::istringstream numbers(line);
    for (std::string word; numbers >> word;) values.push_back(std::strtof(word.c_str(), nullptr));  // reads nan, too
  }
  if (roots == 0 || values.size() % roots != 0) {
    std::cerr << "every line must hold the same number of scalars\n";
    return 2;
  }
  const at::Tensor scalars = at::from_blob(values.data(), {roots, int64_t(values.size()) / roots}, at::kFloat);
  try {
    espalier::Selector selector(argv[1]);
    for (const auto& action : selector.decide(scalars, std::string(argv[2]) == "passed"))
      std::cout << action.K << " " << action.L1 << " " << action.L2 << "\n";
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
}
