// Resizes images of three 8-bit channels, with PIL's pixels to the bit.
//
// PIL resizes in two passes, and rounds to 8 bits after each. A pixel of a pass is a sum of source
// pixels times integer weights with 22 fractional bits. Here a weight is high * 4096 + low, both of
// 16 bits, so that one instruction multiplies and adds two source pixels. The sums of the two parts
// may wrap at 32 bits; what they make together does not, and has the bits of PIL's 32-bit sum.
//
// Compile with -ffp-contract=off: weights are PIL's to the bit, without fused operations.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <vector>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

typedef uint8_t u8;
constexpr int WEIGHT_BITS = 22;
constexpr int LOW_BITS = 12;
constexpr int CHANNELS = 3;
constexpr int LANES = 16;

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

// -- 16 lanes: pairs of source pixels (16 bits each), or sums (32 bits) --------------------------

#if defined(__AVX2__)
typedef __m256i Vector;
INLINE Vector splat(int32_t x) { return _mm256_set1_epi32(x); }
INLINE Vector add(Vector a, Vector b) { return _mm256_add_epi32(a, b); }
INLINE Vector dot(Vector pairs, Vector weights) { return _mm256_madd_epi16(pairs, weights); }
INLINE Vector shift_left(Vector a) { return _mm256_slli_epi32(a, LOW_BITS); }
INLINE Vector shift_right(Vector a) { return _mm256_srai_epi32(a, WEIGHT_BITS); }
#elif defined(__SSE2__)
typedef __m128i Vector;
INLINE Vector splat(int32_t x) { return _mm_set1_epi32(x); }
INLINE Vector add(Vector a, Vector b) { return _mm_add_epi32(a, b); }
INLINE Vector dot(Vector pairs, Vector weights) { return _mm_madd_epi16(pairs, weights); }
INLINE Vector shift_left(Vector a) { return _mm_slli_epi32(a, LOW_BITS); }
INLINE Vector shift_right(Vector a) { return _mm_srai_epi32(a, WEIGHT_BITS); }
#else
typedef int32_t Vector __attribute__((vector_size(16)));
typedef uint32_t Bits __attribute__((vector_size(16)));
INLINE Vector splat(int32_t x) { return Vector{x, x, x, x}; }
INLINE Vector add(Vector a, Vector b) { return (Vector)((Bits)a + (Bits)b); }
INLINE Vector dot(Vector pairs, Vector weights) {
  const Vector low = (pairs & 0xffff) * ((Vector)((Bits)weights << 16) >> 16);
  return low + (pairs >> 16) * (weights >> 16);
}
INLINE Vector shift_left(Vector a) { return (Vector)((Bits)a << LOW_BITS); }
INLINE Vector shift_right(Vector a) { return a >> WEIGHT_BITS; }
#endif
constexpr int VECTORS = LANES * 4 / sizeof(Vector);

struct Lanes {
  Vector of[VECTORS];
};

// a[i] | b[i] << 16
INLINE Lanes zip(const u8* a, const u8* b) {
  Lanes out;
#if defined(__SSE2__)
  const __m128i x = _mm_loadu_si128((const __m128i*)a), y = _mm_loadu_si128((const __m128i*)b);
  const __m128i first = _mm_unpacklo_epi8(x, y), last = _mm_unpackhi_epi8(x, y);
#if defined(__AVX2__)
  out.of[0] = _mm256_cvtepu8_epi16(first);
  out.of[1] = _mm256_cvtepu8_epi16(last);
#else
  const __m128i zero = _mm_setzero_si128();
  out.of[0] = _mm_unpacklo_epi8(first, zero);
  out.of[1] = _mm_unpackhi_epi8(first, zero);
  out.of[2] = _mm_unpacklo_epi8(last, zero);
  out.of[3] = _mm_unpackhi_epi8(last, zero);
#endif
#else
  int32_t pairs[LANES];
  for (int i = 0; i < LANES; i++) pairs[i] = a[i] | b[i] << 16;
  memcpy(&out, pairs, sizeof out);
#endif
  return out;
}

// The sums as 8 bits, 0 to 255.
INLINE void narrow(const Lanes& sums, u8* out) {
#if defined(__AVX2__)
  const __m256i words = _mm256_packs_epi32(sums.of[0], sums.of[1]);  // 0-3, 8-11, 4-7, 12-15
  const __m128i bytes =
      _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128((__m128i*)out, _mm_shuffle_epi32(bytes, _MM_SHUFFLE(3, 1, 2, 0)));
#elif defined(__SSE2__)
  const __m128i first = _mm_packs_epi32(sums.of[0], sums.of[1]);
  const __m128i last = _mm_packs_epi32(sums.of[2], sums.of[3]);
  _mm_storeu_si128((__m128i*)out, _mm_packus_epi16(first, last));
#else
  int32_t all[LANES];
  memcpy(all, &sums, sizeof all);
  for (int i = 0; i < LANES; i++) out[i] = all[i] < 0 ? 0 : all[i] > 255 ? 255 : all[i];
#endif
}

struct Weight {  // of a pair of source pixels: two numbers of 16 bits each
  int32_t high, low;
};

template <int N>  // times 16 lanes that have the same weights
struct Sums {
  Lanes high[N], low[N];

  INLINE Sums() {
    UNROLL for (int i = 0; i < N; i++)
      UNROLL for (int j = 0; j < VECTORS; j++) high[i].of[j] = low[i].of[j] = splat(0);
  }
  template <class Pairs>
  INLINE void add_products(const Weight& weight, const Pairs& pairs) {
    const Vector high_weight = splat(weight.high), low_weight = splat(weight.low);
    UNROLL for (int i = 0; i < N; i++) {
      const Lanes& one = pairs(i);
      UNROLL for (int j = 0; j < VECTORS; j++) {
        high[i].of[j] = add(high[i].of[j], dot(one.of[j], high_weight));
        low[i].of[j] = add(low[i].of[j], dot(one.of[j], low_weight));
      }
    }
  }
  INLINE void round(u8* out) const {
    const Vector half = splat(1 << (WEIGHT_BITS - 1));
    UNROLL for (int i = 0; i < N; i++) {
      Lanes all;
      UNROLL for (int j = 0; j < VECTORS; j++)
        all.of[j] = shift_right(add(add(shift_left(high[i].of[j]), low[i].of[j]), half));
      narrow(all, out + i * LANES);
    }
  }
};

// to[i][j] = from[j][i]: 16 x 16
INLINE void transpose(const u8* const* from, u8* to, long to_row) {
#if defined(__SSE2__)
  __m128i a[LANES], b[LANES];
  for (int i = 0; i < LANES; i++) a[i] = _mm_loadu_si128((const __m128i*)from[i]);
  const auto step = [](const __m128i* x, __m128i* y) {
    for (int i = 0; i < LANES / 2; i++) {
      y[2 * i] = _mm_unpacklo_epi8(x[i], x[i + LANES / 2]);
      y[2 * i + 1] = _mm_unpackhi_epi8(x[i], x[i + LANES / 2]);
    }
  };
  step(a, b), step(b, a), step(a, b), step(b, a);
  for (int i = 0; i < LANES; i++) _mm_storeu_si128((__m128i*)(to + i * to_row), a[i]);
#else
  for (int i = 0; i < LANES; i++)
    for (int j = 0; j < LANES; j++) to[i * to_row + j] = from[j][i];
#endif
}

// -- weights -------------------------------------------------------------------------------------

constexpr double PI = 3.14159265358979323846;

double sinc(double x) { return x == 0.0 ? 1.0 : sin(x * PI) / (x * PI); }

double lanczos(double x) { return -3.0 <= x && x < 3.0 ? sinc(x) * sinc(x / 3) : 0.0; }

double bilinear(double x) {
  x = fabs(x);
  return x < 1.0 ? 1.0 - x : 0.0;
}

double bicubic(double x) {  // Keys' convolution with a = -1/2
  x = fabs(x);
  if (x < 1.0) return (1.5 * x - 2.5) * x * x + 1;
  return x < 2.0 ? (((x - 5) * x + 8) * x - 4) * -0.5 : 0.0;
}

double box(double x) { return x > -0.5 && x <= 0.5 ? 1.0 : 0.0; }

double hamming(double x) {
  x = fabs(x);
  if (x == 0.0 || x >= 1.0) return x == 0.0;
  return sin(x * PI) / (x * PI) * (0.54f + 0.46f * cos(x * PI));
}

struct Filter {
  double (*at)(double);
  double support;  // in pixels of the smaller image
};

// By PIL's number. 0 (nearest) is none.
const Filter FILTERS[] = {{nullptr, 0},  {lanczos, 3}, {bilinear, 1},
                          {bicubic, 2}, {box, 0.5},   {hamming, 1}};

// The weights of one axis, for all pixels of the result.
struct Axis {
  struct Pixel {
    long first, pairs;  // source pixel; pairs of source pixels from there on
    const Weight* weights;
  };
  long from, to;  // pixels
  std::vector<Pixel> pixels;
  std::vector<Weight> weights;

  // even: pairs begin at even source pixels.
  Axis(long from, long to, const Filter& filter, bool even) : from(from), to(to) {
    const double scale = (double)from / to;
    const double wider = scale < 1.0 ? 1.0 : scale, narrower = 1.0 / wider;
    const double support = filter.support * wider;
    const long most = (long)ceil(support) * 2 + 1, stride = most / 2 + 2;
    pixels.resize(to);
    weights.resize(to * stride);
    std::vector<double> found(most);
    for (long i = 0; i < to; i++) {
      const double center = (i + 0.5) * scale;
      const long begin = std::max((long)(center - support + 0.5), 0L);
      const long count = std::min((long)(center + support + 0.5), from) - begin;
      double sum = 0.0;
      for (long j = 0; j < count; j++) {
        found[j] = filter.at((j + begin - center + 0.5) * narrower);
        sum += found[j];
      }
      const long odd = even ? begin % 2 : 0;
      Weight* own = &weights[i * stride];
      for (long j = 0; j < count; j++) {
        const double one = (sum != 0.0 ? found[j] / sum : found[j]) * (1 << WEIGHT_BITS);
        put(own, j + odd, (int32_t)(one < 0 ? one - 0.5 : one + 0.5));
      }
      pixels[i] = {begin - odd, (count + odd + 1) / 2, own};
    }
  }

 private:
  static void put(Weight* weights, long at, int32_t weight) {
    const int32_t half = 1 << (LOW_BITS - 1);
    const int32_t high = (weight + half) >> LOW_BITS, low = weight - high * (1 << LOW_BITS);
    const int shift = at % 2 * 16;
    weights[at / 2].high |= (int32_t)((uint32_t)(uint16_t)high << shift);
    weights[at / 2].low |= (int32_t)((uint32_t)(uint16_t)low << shift);
  }
};

// -- passes --------------------------------------------------------------------------------------

struct Image {
  u8* data;
  long row;  // bytes from one row to the next
  u8* at(long y) const { return data + y * row; }
};

// One row of a result, N * 16 columns of it. zipped: makes lanes of 16 columns of two rows.
template <int N, class Zip>
INLINE void resize_columns(const Image& from, const Axis& axis, long y, long column,
                           const Zip& zipped, u8* out) {
  const Axis::Pixel& pixel = axis.pixels[y];
  Sums<N> sums;
  for (long i = 0; i < pixel.pairs; i++) {
    const long row = pixel.first + 2 * i;
    const u8* first = from.at(row) + column;
    // The last pair may lack its second row: its weight is 0.
    const u8* second = row + 1 < axis.from ? first + from.row : first;
    sums.add_products(pixel.weights[i],
                      [&](int j) { return zipped(first + j * LANES, second + j * LANES); });
  }
  sums.round(out);
}

// columns: bytes of a row.
void resize_down(const Image& from, const Image& to, const Axis& axis, long columns) {
  for (long y = 0; y < axis.to; y++) {
    u8* out = to.at(y);
    long x = 0;
    for (; x + 2 * LANES <= columns; x += 2 * LANES)
      resize_columns<2>(from, axis, y, x, zip, out + x);
    for (; x + LANES <= columns; x += LANES) resize_columns<1>(from, axis, y, x, zip, out + x);
    if (const long left = columns - x) {
      u8 last[LANES];
      const auto zip_left = [left](const u8* a, const u8* b) {
        u8 first[LANES] = {}, second[LANES] = {};
        memcpy(first, a, left), memcpy(second, b, left);
        return zip(first, second);
      };
      resize_columns<1>(from, axis, y, x, zip_left, last);
      memcpy(out + x, last, left);
    }
  }
}

// 16 rows at a time, which are transposed: rows are lanes.
void resize_across(const Image& from, const Image& to, const Axis& axis, long rows) {
  constexpr long GROUP = LANES * CHANNELS;  // bytes of 16 pixels
  const long groups = (axis.from + LANES - 1) / LANES, made = (axis.to + LANES - 1) / LANES;
  std::vector<Lanes> pairs(groups * GROUP / 2);  // [pairs of pixels, channels]
  std::vector<u8> columns(made * GROUP * LANES);
  for (long top = 0; top < rows; top += LANES) {
    const u8* row[LANES];
    for (long i = 0; i < LANES; i++) row[i] = from.at(std::min(top + i, rows - 1));
    for (long group = 0; group < groups; group++) {
      u8 padded[LANES][GROUP], lanes[GROUP * LANES];
      const long bytes = std::min<long>(GROUP, axis.from * CHANNELS - group * GROUP);
      const u8* source[LANES];
      for (long i = 0; i < LANES; i++) {
        source[i] = row[i] + group * GROUP;
        if (bytes < GROUP) {
          memcpy(padded[i], source[i], bytes);
          memset(padded[i] + bytes, 0, GROUP - bytes);
          source[i] = padded[i];
        }
      }
      for (long i = 0; i < GROUP; i += LANES) {
        transpose(source, lanes + i * LANES, LANES);
        for (long j = 0; j < LANES; j++) source[j] += LANES;
      }
      Lanes* out = &pairs[group * GROUP / 2];
      for (long i = 0; i < LANES; i += 2)
        for (long channel = 0; channel < CHANNELS; channel++) {
          const u8* first = lanes + (i * CHANNELS + channel) * LANES;
          *out++ = zip(first, first + CHANNELS * LANES);
        }
    }
    u8* out = columns.data();
    for (const Axis::Pixel& pixel : axis.pixels) {
      const Lanes* source = &pairs[pixel.first / 2 * CHANNELS];
      Sums<CHANNELS> sums;
      for (long i = 0; i < pixel.pairs; i++, source += CHANNELS)
        sums.add_products(pixel.weights[i],
                          [source](int channel) -> const Lanes& { return source[channel]; });
      sums.round(out);
      out += CHANNELS * LANES;
    }
    const long tall = std::min<long>(LANES, rows - top);
    for (long column = 0; column < axis.to * CHANNELS; column += LANES) {
      u8 block[LANES * LANES];
      const u8* source[LANES];
      for (long i = 0; i < LANES; i++) source[i] = &columns[(column + i) * LANES];
      const long wide = std::min<long>(LANES, axis.to * CHANNELS - column);
      if (tall == LANES && wide == LANES) {
        transpose(source, to.at(top) + column, to.row);
        continue;
      }
      transpose(source, block, LANES);
      for (long i = 0; i < tall; i++) memcpy(to.at(top + i) + column, block + i * LANES, wide);
    }
  }
}

struct Arguments {  // as in library.py
  u8* from;
  long from_row, from_height, from_width;
  u8* to;
  long to_row, to_height, to_width;
  long filter, down_first;
};

void resize(const Arguments& a) {
  const Filter& filter = FILTERS[a.filter];
  const Axis down(a.from_height, a.to_height, filter, false);
  const Axis across(a.from_width, a.to_width, filter, true);
  const Image from{a.from, a.from_row}, to{a.to, a.to_row};
  if (a.from_width == a.to_width) return resize_down(from, to, down, a.to_width * CHANNELS);
  if (a.from_height == a.to_height) return resize_across(from, to, across, a.to_height);
  // All rows and columns are used, as the source has no margin.
  const long tall = a.down_first ? a.to_height : a.from_height;
  const long row = (a.down_first ? a.from_width : a.to_width) * CHANNELS;
  const std::unique_ptr<u8[]> pixels(new u8[tall * row]);
  const Image between{pixels.get(), row};
  if (a.down_first) {
    resize_down(from, between, down, row);
    resize_across(between, to, across, tall);
  } else {
    resize_across(from, between, across, tall);
    resize_down(between, to, down, row);
  }
}

}  // namespace

// Returns 1 where there is no memory.
extern "C" long quire_resize(const Arguments* arguments) {
  try {
    resize(*arguments);
  } catch (const std::exception&) {
    return 1;
  }
  return 0;
}
