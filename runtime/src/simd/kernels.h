// The arithmetic that the time goes into, compiled once per instruction set and chosen at run time.
//
// kernels.inc is the one text; generic.cc, avx2.cc and avx512.cc compile it. Nothing here may use a
// template or inline function of the standard library: the linker keeps one copy of those, and it
// must not be the one with instructions that an older CPU lacks.
#pragma once

#include <cstdint>

namespace gapa::simd {

/// The points that may be among the nearest of one query, while others stream past.
///
/// A point's score ½‖p‖² − q·p ranks like its distance.
struct Shortlist {
  float* scores;  ///< room for one tile and one vector more than are counted
  int32_t* rows;
  int64_t count;
  float limit;  ///< points of the tile at hand with a score above are out
};

/// Points packed for the scan: a panel holds `Kernels::lanes` points, axis by axis.
struct Panels {
  const float* coordinates;  ///< (panels, d, lanes)
  const float* half_norms;   ///< (panels, lanes): ½‖p‖², +∞ for a lane without a point
  int64_t count;             ///< panels of this tile, 1 … Kernels::panels
  int64_t dim;
  int64_t first_row;           ///< of the first lane
  int64_t row_begin, row_end;  ///< other rows are left out
};

/// A tile of queries, centred like the points.
struct Queries {
  const float* const* rows;  ///< (count) of d numbers each
  Shortlist* const* lists;   ///< (count)
  int64_t count;             ///< a power of two up to Kernels::queries
};

/// How far a score may be off, given the norm of the point; see Kernels::worst_scores.
struct ErrorBound {
  float a, b, q;
};

struct Range {
  float least, largest;
};

/// Axes of the Gram matrix that are summed at a time, so that what is read stays in the first
/// cache.
inline constexpr int64_t kGramAxes = 64;

/// What stands for Gaussian noise.
struct Noise {
  const double* values;   ///< (columns, stride): a column of points after the other
  const double* weights;  ///< (stride): of each point, 0 for those that only fill the stride
  int64_t columns;
  int64_t stride;  ///< a multiple of Kernels::lanes
};

/// Rows of logits: class c of row i is at c · class_step + i · row_step. One of the steps is 1.
struct Logits {
  const float *mean, *var;
  const float* output;  ///< whose first class of the largest is kept
  int64_t classes, class_step, row_step;
};

/// What is told of them. Each may be nullptr; `probs` lies like the logits, the others one per row.
struct ClassesAnswers {
  float *probs, *entropy, *aleatoric, *epistemic, *score;
};

struct Kernels {
  const char* name;
  int lanes;    ///< points per panel
  int panels;   ///< most panels of a tile
  int queries;  ///< most queries of a tile
  int padding;  ///< rows of the matrices below come in multiples of this

  /// Adds the points of the panels that can be near to the shortlist of each query.
  void (*scan)(const Panels& panels, const Queries& queries);

  /// to = x − centre in float32, d numbers; returns ‖to‖².
  double (*centred)(const float* x, const float* centre, int64_t dim, float* to);

  /// u = x − centre, d numbers, and to[r] = u · row r of the basis, (rows, d); returns ‖u‖².
  double (*projected)(const float* x, const float* centre, const double* basis, int64_t rows,
                      int64_t dim, double* u, double* to);

  /// How far the score of each candidate may be off, and the score plus that:
  ///     error(n) = a n (n/2 + q) + b (1 + n + q) with n = norms[row >> lane bits].
  /// Returns the least and the largest of the sums.
  Range (*worst_scores)(const Shortlist& list, const float* norms, const ErrorBound& error,
                        float* errors, float* sums);

  /// Keeps the candidates whose score minus error is at most `bound`.
  void (*keep)(Shortlist* list, const float* errors, float bound);

  /// The least and the largest of the values.
  Range (*range)(const float* values, int64_t count);

  /// Writes the positions of the values that are at most `bound`; returns how many.
  int64_t (*positions_up_to)(const float* values, int64_t count, float bound, int32_t* positions);

  /// How many of the values are at most `bound`.
  int64_t (*count_up_to)(const float* values, int64_t count, float bound);

  /// Writes the positions of the values that are not below `bound`, also of those that are no
  /// number; returns how many.
  int64_t (*positions_from)(const float* values, int64_t count, float bound, int32_t* positions);

  /// The largest of each group of `size` values, infinite where one of them is no number. Which
  /// values make a group depends on the lanes; those that fill no group have none. Returns how
  /// many groups there are.
  int64_t (*highest)(const float* values, int64_t count, int64_t size, float* to);

  /// ‖point − query‖² in double, by direct differences.
  double (*squared_distance)(const float* point, const double* query, int64_t dim);

  /// ‖a − b‖² in float32, for a graph walk.
  float (*rough_distance)(const float* a, const float* b, int64_t dim);

  /// gram[j·stride + i] = exp(−scale · ‖p_i − p_j‖²) for j ≤ i < count. The query counts as point
  /// number `count`, and as those behind it up to the stride. `squared` are the squared distances
  /// to the query, (stride); `scratch` has room for (kGramAxes, stride); of `gram`, (stride,
  /// stride), entries above the diagonal may be written too.
  void (*gram)(const float* const* points, int64_t count, const double* query,
               const double* squared, int64_t dim, int64_t stride, double scale, double* scratch,
               double* gram);

  /// Columns 0 … count-1 of the Cholesky factor of gram + jitter·I, all rows up to the stride: the
  /// rows from `count` on come out as L⁻¹ times what stands in them. False if a pivot is not
  /// positive.
  bool (*factorise)(const double* gram, int64_t count, int64_t stride, double jitter,
                    double* factor);

  /// ‖L⁻¹k‖² with k_i = exp(−scale · ‖p_i − query‖²), where p_i is row rows[i] of the points.
  ///
  /// With u = query − p_0, ‖p_i − query‖² = ‖u‖² + ‖p_i − p_0‖² − 2 (u·p_i − u·p_0), in double.
  /// `known` holds what does not depend on the query, in vectors of w = lanes / 2 numbers: the
  /// ‖p_i − p_0‖², then L⁻¹ in blocks of w rows, of which block b has its columns 0 … (b+1)w - 1
  /// one after the other, then the rows that make no block, one after the other; filled up with 0.
  /// `room` is for dim + count + lanes numbers.
  double (*explained)(const float* points, const int32_t* rows, int64_t count, const float* query,
                      int64_t dim, double scale, const double* known, double* room);

  /// Numbers that classes() needs to work with.
  int64_t (*classes_room)(int64_t classes);

  /// Probabilities softmax(mean / √(1 + π/8 · mean of var)), where the kept class has the largest
  /// and no other the same; the entropies of softmax(mean + √var · noise), where the class of rank
  /// r takes column r mod `columns`; the mean of var. NaN for a row with a NaN or a mean of +∞, and
  /// for the entropies of one with a variance that is negative or infinite. A row's answers depend
  /// on that row alone, bit for bit.
  void (*classes)(const Noise& noise, const Logits& logits, int64_t rows, double* room,
                  const ClassesAnswers& answers);
};

/// The kernels for this CPU, chosen once. GAPA_ONNX_ISA=generic or avx2 holds them lower.
const Kernels& kernels();

}  // namespace gapa::simd
