/* A selector's decisions in C99 or C++, from an artefact's selector.bin: no library but libm.
 *
 *     char error[ESPALIER_ERROR];
 *     espalier *selector = espalier_load("runs/demo/selector/selector.bin", error);  // NULL: `error` says why
 *     espalier_action action;
 *     if (espalier_decide(selector, scalars, selector->scalars, NULL, 0, &action, NULL) >= 0) draft(action);
 *     espalier_free(selector);
 *
 * It decides as selector/plain.py does. Threads may share a selector. The file, which selector/export/flat.py writes,
 * is a row of words of 4 bytes, float32 or int32, in this machine's byte order. Damaged files and wrong features are
 * refused and never read out of bounds.
 *
 * Legend: F scalars, D hidden width, S sampling settings, L context lengths, A actions, I inputs, O outputs.
 */
#ifndef ESPALIER_H
#define ESPALIER_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef ESPALIER_API
#define ESPALIER_API static inline
#endif
enum { ESPALIER_MAGIC = 0x50534531, ESPALIER_FORMAT = 11 };
enum { ESPALIER_ERROR = 256, ESPALIER_BLOCKS = 8, ESPALIER_LAYERS = 16, ESPALIER_MOST = 1 << 20 };
/* What `espalier_decide` returns instead of a position: wrong widths, a number that is not finite, no memory. */
enum { ESPALIER_WIDTH = -1, ESPALIER_NOT_FINITE = -2, ESPALIER_MEMORY = -3 };
enum { ESPALIER_TEMPERATURE, ESPALIER_TOP_P, ESPALIER_BATCH, ESPALIER_MATCH, ESPALIER_CONTEXT, ESPALIER_PLACES };

/* A tree of K branches of L2 tokens below a trunk of L1 tokens; a lookup of L1 tokens if K is 0. How branches are drawn:
 * 0 independently, 1 without replacement, 2 greedily (selector/actions.py). */
typedef struct {
  int32_t K, L1, L2, style;
} espalier_action;

/* A linear map: weights [I, O] and biases. Or weights that are 0 or 1, of which those of input i that are 1 have the
 * outputs column[start[i]] to column[start[i + 1] - 1]. `gain` and `shift` are a layer norm after the map. */
typedef struct {
  size_t inputs, outputs;
  const int32_t *start, *column;
  const float *weight_IO, *bias_O, *gain_O, *shift_O;
} espalier_map;

typedef struct {
  size_t actions, scalars, early, states; /* A; F; those of the first level; D of all hidden states together */
  size_t place[ESPALIER_PLACES];          /* positions of scalars */
  size_t settings, lengths, blocks, layers, widest, words, read;
  int regressor, damaged;
  uint32_t *file;
  const int32_t *shapes_A4, *allowed_SA, *copied_SA, *static_SA, *count_F;
  const float *settings_S3, *lengths_L, *early_SLA, *late_SLA, *speed_S, *rho_S, *late_S, *least_S, *level_S;
  const float *longest_S;
  const float *mean_F, *scale_F, *low_F, *high_F;
  espalier_map block[ESPALIER_BLOCKS], layer[ESPALIER_LAYERS], factors, sums;
} espalier;

/* -- loading ------------------------------------------------------------------------------------------------------- */

/* The next words; NULL, and the file is damaged, where there are not so many. */
static inline const void *espalier_take(espalier *s, uint64_t count) {
  const uint32_t *begin = s->file + s->read;
  if (s->damaged || count > s->words - s->read) return s->damaged = 1, (const void *)NULL;
  s->read += (size_t)count;
  return begin;
}

static inline const float *espalier_floats(espalier *s, uint64_t count) {
  return (const float *)espalier_take(s, count);
}

static inline const int32_t *espalier_ints(espalier *s, uint64_t count) {
  return (const int32_t *)espalier_take(s, count);
}

/* The next word, from `least` to `most`; else `least`, and the file is damaged. */
static inline size_t espalier_count(espalier *s, size_t least, size_t most) {
  const int32_t *word = espalier_ints(s, 1);
  if (!word || *word < 0 || (size_t)*word < least || (size_t)*word > most) return s->damaged = 1, least;
  return (size_t)*word;
}

static inline void espalier_linear(espalier *s, espalier_map *map, size_t inputs, int normed) {
  const size_t O = map->outputs = espalier_count(s, 1, ESPALIER_MOST);
  map->inputs = inputs;
  map->weight_IO = espalier_floats(s, (uint64_t)inputs * O);
  map->bias_O = espalier_floats(s, O);
  if (normed) map->gain_O = espalier_floats(s, O), map->shift_O = espalier_floats(s, O);
  if (O > s->widest) s->widest = O;
}

static inline void espalier_sparse(espalier *s, espalier_map *map, size_t inputs, size_t outputs) {
  const size_t ones = espalier_count(s, 0, INT32_MAX);
  size_t i;
  map->inputs = inputs, map->outputs = outputs;
  map->start = espalier_ints(s, (uint64_t)inputs + 1), map->column = espalier_ints(s, ones);
  if (s->damaged) return;
  for (i = 0; i < inputs; ++i) s->damaged |= map->start[i] > map->start[i + 1];
  s->damaged |= map->start[0] != 0 || (size_t)map->start[inputs] != ones;
  for (i = 0; i < ones; ++i) s->damaged |= map->column[i] < 0 || (size_t)map->column[i] >= outputs;
}

static inline void espalier_network(espalier *s) {
  size_t values = s->scalars + 1, i;
  s->mean_F = espalier_floats(s, s->scalars), s->scale_F = espalier_floats(s, s->scalars);
  s->low_F = espalier_floats(s, s->scalars), s->high_F = espalier_floats(s, s->scalars);
  s->count_F = espalier_ints(s, s->scalars);
  s->blocks = espalier_count(s, 0, ESPALIER_BLOCKS);
  for (i = 0; i < s->blocks; ++i) {
    espalier_linear(s, s->block + i, espalier_count(s, 1, ESPALIER_MOST), 1);
    s->states += s->block[i].inputs, values += s->block[i].outputs;
  }
  if (values > s->widest) s->widest = values;
  s->layers = espalier_count(s, 1, ESPALIER_LAYERS);
  for (i = 0; i < s->layers; ++i) {
    espalier_linear(s, s->layer + i, values, 0);
    values = s->layer[i].outputs;
  }
  if (s->regressor) {
    espalier_sparse(s, &s->factors, values, values);
    espalier_sparse(s, &s->sums, values, s->actions);
  } else {
    s->damaged |= values != s->actions;
  }
}

static inline void espalier_tables(espalier *s) {
  uint64_t S, L, A;
  size_t i;
  s->scalars = espalier_count(s, 1, ESPALIER_MOST), s->early = espalier_count(s, 1, s->scalars);
  for (i = 0; i < ESPALIER_PLACES; ++i) s->place[i] = espalier_count(s, 0, s->early - 1);
  A = s->actions = s->widest = espalier_count(s, 1, ESPALIER_MOST);
  S = s->settings = espalier_count(s, 1, 1 << 16), L = s->lengths = espalier_count(s, 2, 1 << 16);
  s->regressor = (int)espalier_count(s, 0, 1);
  s->shapes_A4 = espalier_ints(s, 4 * A);
  s->settings_S3 = espalier_floats(s, 3 * S), s->lengths_L = espalier_floats(s, L);
  s->early_SLA = espalier_floats(s, S * L * A), s->late_SLA = espalier_floats(s, S * L * A);
  s->speed_S = espalier_floats(s, S), s->rho_S = espalier_floats(s, S);
  s->late_S = espalier_floats(s, S), s->least_S = espalier_floats(s, S), s->level_S = espalier_floats(s, S);
  s->longest_S = espalier_floats(s, S);
  s->allowed_SA = espalier_ints(s, S * A), s->copied_SA = espalier_ints(s, S * A);
  s->static_SA = espalier_ints(s, S * A);
}

/* CRC-32, as zlib computes it. */
static inline uint32_t espalier_checksum(const uint32_t *words, size_t count) {
  const unsigned char *bytes = (const unsigned char *)words;
  uint32_t crc = 0xffffffffu;
  size_t i;
  int bit;
  for (i = 0; i < 4 * count; ++i)
    for (crc ^= bytes[i], bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (0xedb88320u & (0u - (crc & 1u)));
  return ~crc;
}

ESPALIER_API void espalier_free(espalier *s) {
  if (s) free(s->file);
  free(s);
}

/* The selector of a file; NULL, and why in `error`, where it is missing, damaged or of another format. */
ESPALIER_API espalier *espalier_load(const char *path, char error[ESPALIER_ERROR]) {
  espalier *s = (espalier *)calloc(1, sizeof(espalier));
  FILE *file = s ? fopen(path, "rb") : NULL;
  const char *wrong = s ? "cannot be read" : "no memory";
  long size = file && !fseek(file, 0, SEEK_END) ? ftell(file) : -1;
  if (size > 0 && size < 1L << 30 && !fseek(file, 0, SEEK_SET)) s->file = (uint32_t *)malloc((size_t)size);
  if (s && s->file && fread(s->file, 1, (size_t)size, file) == (size_t)size) {
    s->words = (size_t)size / 4, s->read = 3; /* after the magic number, the checksum and the format */
    if (size % 4 || size < 12 || s->file[0] != ESPALIER_MAGIC) wrong = "no file for espalier.h";
    else if (s->file[1] != espalier_checksum(s->file + 2, s->words - 2)) wrong = "damaged: export the selector again";
    else if (s->file[2] != ESPALIER_FORMAT) wrong = "another format: export the selector again";
    else {
      espalier_tables(s);
      espalier_network(s);
      wrong = s->damaged || s->read != s->words ? "its parts do not fit: export the selector again" : NULL;
    }
  }
  if (file) fclose(file);
  if (!wrong) return s;
  snprintf(error, ESPALIER_ERROR, "%s: %s", path, wrong);
  espalier_free(s);
  return NULL;
}

/* -- deciding ------------------------------------------------------------------------------------------------------ */

static inline int espalier_finite(const float *values, size_t count) {
  size_t i;
  uint32_t bits; /* of the exponent: isfinite() may be compiled to 1 under -ffast-math */
  for (i = 0; i < count; ++i) {
    memcpy(&bits, values + i, 4);
    if ((bits & 0x7f800000u) == 0x7f800000u) return 0;
  }
  return 1;
}

static inline void espalier_apply(const espalier_map *map, const float *x_I, float *y_O) {
  size_t i, o;
  int32_t k;
  for (o = 0; o < map->outputs; ++o) y_O[o] = map->bias_O ? map->bias_O[o] : 0.0f;
  for (i = 0; i < map->inputs; ++i) {
    const float x = x_I[i];
    if (x == 0) continue; /* half of a layer's values are, after ReLU */
    if (map->start)
      for (k = map->start[i]; k < map->start[i + 1]; ++k) y_O[map->column[k]] += x;
    else
      for (o = 0; o < map->outputs; ++o) y_O[o] += x * map->weight_IO[i * map->outputs + o];
  }
}

static inline void espalier_norm(const espalier_map *block, float *x) {
  float mean = 0, variance = 0;
  size_t i, n = block->outputs;
  for (i = 0; i < n; ++i) mean += x[i] / (float)n;
  for (i = 0; i < n; ++i) variance += (x[i] - mean) * (x[i] - mean) / (float)n;
  for (i = 0; i < n; ++i) x[i] = (x[i] - mean) / sqrtf(variance + 1e-5f) * block->gain_O[i] + block->shift_O[i];
}

/* The network's outputs, in one of the two buffers; later scalars and hidden states are not looked at before the draft
 * has `passed` the root. */
static inline float *espalier_outputs(const espalier *s, const float *scalars, const float *states, int passed,
                                      float *x, float *y) {
  size_t i, k, seen = passed ? s->scalars : s->early, at = s->scalars + 1;
  memset(x, 0, s->widest * sizeof(float));
  for (i = 0; i < seen; ++i) {
    float value = fminf(fmaxf(scalars[i], s->low_F[i]), s->high_F[i]);
    if (s->count_F[i]) value = log1pf(fmaxf(value, 0));
    x[i] = (value - s->mean_F[i]) / s->scale_F[i];
  }
  x[s->scalars] = (float)passed;
  for (i = 0; passed && i < s->blocks; ++i) {
    espalier_apply(s->block + i, states, x + at);
    espalier_norm(s->block + i, x + at);
    states += s->block[i].inputs, at += s->block[i].outputs;
  }
  for (i = 0; i < s->layers; ++i) {
    float *last = x;
    espalier_apply(s->layer + i, x, y);
    x = y, y = last;
    for (k = 0; i + 1 < s->layers && k < s->layer[i].outputs; ++k)
      x[k] = s->regressor ? fmaxf(x[k], 0)
                          : 0.5f * x[k] * (1 + tanhf(0.7978845608f * (x[k] + 0.044715f * x[k] * x[k] * x[k])));
  }
  return x;
}

/* The nearest sampling setting and batch size, among those for the level that is known; one that is not `beyond` the
 * distance at which it may decide comes first. */
static inline size_t espalier_nearest(const espalier *s, const float *scalars, int passed, int *beyond) {
  const float batch = 1e-3f * log2f(fmaxf(scalars[s->place[ESPALIER_BATCH]], 1));
  float nearest = INFINITY;
  size_t i, at = 0;
  for (i = 0; i < s->settings; ++i) {
    const float *own = s->settings_S3 + 3 * i;
    const float warmer = fabsf(scalars[s->place[ESPALIER_TEMPERATURE]] - own[0]);
    const float wider = fabsf(scalars[s->place[ESPALIER_TOP_P]] - own[1]);
    const int far = warmer > 0.100001f || (wider > 0.050001f && scalars[s->place[ESPALIER_TEMPERATURE]] > 0);
    const float distance = warmer + wider + fabsf(batch - own[2]) + (far ? 1e3f : 0);
    if ((s->level_S[i] == -1 || s->level_S[i] == (float)passed) && distance < nearest)
      nearest = distance, at = i, *beyond = far;
  }
  return at;
}

/* From logits of one more token's acceptance, in x, to net tokens, in y: `E - price T`, as in selector/decision.py. */
static inline void espalier_net(const espalier *s, size_t at, const float *table_LA, float length,
                                const int32_t *may, float *x, float *y) {
  const size_t A = s->actions;
  size_t a, above = 1;
  float share, best = 0, price, *seconds_A = x;
  for (a = 0; a < s->factors.inputs; ++a) x[a] = fminf(x[a], 0) - log1pf(expf(-fabsf(x[a])));
  espalier_apply(&s->factors, x, y);
  for (a = 0; a < s->factors.inputs; ++a) x[a] = expf(y[a]);
  espalier_apply(&s->sums, x, y);
  length = fminf(fmaxf(length, s->lengths_L[0]), s->lengths_L[s->lengths - 1]);
  while (above + 1 < s->lengths && s->lengths_L[above] < length) ++above;
  share = (length - s->lengths_L[above - 1]) / (s->lengths_L[above] - s->lengths_L[above - 1]);
  for (a = 0; a < A; ++a) {
    seconds_A[a] = table_LA[(above - 1) * A + a] * (1 - share) + table_LA[above * A + a] * share;
    y[a] += 1;
    if (may[a]) best = fmaxf(best, y[a] / seconds_A[a]);
  }
  price = powf(s->speed_S[at], 1 - s->rho_S[at]) * powf(best, s->rho_S[at]);
  for (a = 0; a < A; ++a) y[a] -= price * seconds_A[a];
}

/* The position of the best action at one root, which also goes to `action`; below 0 where nothing is decided.
 *   scalars: in the order of config.json, all of them or, before the draft's pass, the first level's `early` alone.
 *   states: the hidden states one after another, if all scalars are given to a selector with `full` features.
 *   scores: NULL, or room for the score of every action. */
ESPALIER_API int espalier_decide(const espalier *s, const float *scalars, size_t scalars_given, const float *states,
                                 size_t states_given, espalier_action *action, float *scores) {
  const int known = scalars_given != s->early;
  const int32_t *may;
  size_t at, a, best = 0;
  float *memory, *x, *y;
  int passed, beyond = 0;
  if (known && (scalars_given != s->scalars || states_given != s->states)) return ESPALIER_WIDTH;
  if (!espalier_finite(scalars, scalars_given)) return ESPALIER_NOT_FINITE;
  if (known && !espalier_finite(states, states_given)) return ESPALIER_NOT_FINITE;
  if (!(memory = (float *)malloc(2 * s->widest * sizeof(float)))) return ESPALIER_MEMORY;
  at = espalier_nearest(s, scalars, known, &beyond), passed = known && s->late_S[at] != 0;
  may = s->static_SA + at * s->actions;
  if (!beyond && scalars[s->place[ESPALIER_CONTEXT]] <= s->longest_S[at])
    may = s->allowed_SA + at * s->actions;
  else if (!beyond && scalars[s->place[ESPALIER_MATCH]] >= s->least_S[at])
    may = s->copied_SA + at * s->actions;
  x = espalier_outputs(s, scalars, states, passed, memory, memory + s->widest);
  y = x == memory ? memory + s->widest : memory;
  if (s->regressor) {
    const float *table_LA = (passed ? s->late_SLA : s->early_SLA) + at * s->lengths * s->actions;
    espalier_net(s, at, table_LA, scalars[s->place[ESPALIER_CONTEXT]], may, x, y);
    x = y;
  }
  for (a = 0; a < s->actions; ++a) {
    if (!may[a]) x[a] = -1e9f;
    if (x[a] > x[best]) best = a;
    if (scores) scores[a] = x[a];
  }
  memcpy(action, s->shapes_A4 + 4 * best, sizeof *action);
  free(memory);
  return (int)best;
}

#endif
