/* Reads the features of one root per line from standard input, the scalars and then any hidden states, and prints the
 * action at each root.
 *
 *     cc -O3 example.c -lm -o example
 *     ./example runs/demo/selector/selector.bin < features.txt
 */
#include "espalier.h"

int main(int argc, char **argv) {
  static float values[1 << 16];
  char error[ESPALIER_ERROR], end;
  espalier *selector;
  espalier_action action;
  size_t given = 0;
  int found = 0;
  if (argc != 2) return fprintf(stderr, "example MODEL < FEATURES\n"), 2;
  if (!(selector = espalier_load(argv[1], error))) return fprintf(stderr, "%s\n", error), 2;
  while (found >= 0 && given < 1 << 16 && scanf("%f%c", values + given, &end) == 2) {
    ++given;
    if (end != '\n') continue;
    const size_t scalars = given < selector->scalars ? given : selector->scalars;
    found = espalier_decide(selector, values, scalars, values + scalars, given - scalars, &action, NULL);
    if (found >= 0) printf("%d %d %d %d\n", (int)action.K, (int)action.L1, (int)action.L2, (int)action.style);
    given = 0;
  }
  if (found < 0) fprintf(stderr, found == ESPALIER_WIDTH ? "wrong number of features\n" : "a number is not finite\n");
  espalier_free(selector);
  return found < 0 ? 2 : 0;
}
