// The BLAS and LAPACK entry points that FAISS was linked against.
//
// Products are done by Eigen. The LAPACK ones serve training only, which never happens here: an
// index arrives trained. They throw instead of pulling in a LAPACK.
#include <Eigen/Core>
#include <stdexcept>

namespace {

template <typename T>
using Matrix =
    Eigen::Map<const Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic>, 0, Eigen::OuterStride<>>;
template <typename T>
using MutableMatrix =
    Eigen::Map<Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic>, 0, Eigen::OuterStride<>>;

bool transposed(const char* flag) { return *flag != 'N' && *flag != 'n'; }

/// C ← alpha · op(A) · op(B) + beta · C, column-major, op(A) is (m, k), op(B) is (k, n).
template <typename T>
int multiply(const char* trans_a, const char* trans_b, int m, int n, int k, T alpha, const T* a,
             int lda, const T* b, int ldb, T beta, T* c, int ldc) {
  MutableMatrix<T> result(c, m, n, Eigen::OuterStride<>(ldc));
  // BLAS: with beta = 0, C need not be set on entry, so it must not be multiplied.
  if (beta == T(0)) {
    result.setZero();
  } else {
    result *= beta;
  }
  const bool ta = transposed(trans_a), tb = transposed(trans_b);
  const Matrix<T> left(a, ta ? k : m, ta ? m : k, Eigen::OuterStride<>(lda));
  const Matrix<T> right(b, tb ? n : k, tb ? k : n, Eigen::OuterStride<>(ldb));
  if (ta && tb) {
    result.noalias() += alpha * left.transpose() * right.transpose();
  } else if (ta) {
    result.noalias() += alpha * left.transpose() * right;
  } else if (tb) {
    result.noalias() += alpha * left * right.transpose();
  } else {
    result.noalias() += alpha * left * right;
  }
  return 0;
}

[[noreturn]] int training_only() {
  throw std::logic_error("LAPACK is not part of the runtime: it serves the training of indexes");
}

}  // namespace

extern "C" {

int sgemm_(const char* ta, const char* tb, const int* m, const int* n, const int* k,
           const float* alpha, const float* a, const int* lda, const float* b, const int* ldb,
           const float* beta, float* c, const int* ldc) {
  return multiply(ta, tb, *m, *n, *k, *alpha, a, *lda, b, *ldb, *beta, c, *ldc);
}

int dgemm_(const char* ta, const char* tb, const int* m, const int* n, const int* k,
           const double* alpha, const double* a, const int* lda, const double* b, const int* ldb,
           const double* beta, double* c, const int* ldc) {
  return multiply(ta, tb, *m, *n, *k, *alpha, a, *lda, b, *ldb, *beta, c, *ldc);
}

int ssyrk_() { training_only(); }
int sgelsd_() { training_only(); }
int sgeqrf_() { training_only(); }
int sgesvd_() { training_only(); }
int sgetrf_() { training_only(); }
int sgetri_() { training_only(); }
int sorgqr_() { training_only(); }
int dgesvd_() { training_only(); }
int dgetrf_() { training_only(); }
int dgetri_() { training_only(); }
int dsyev_() { training_only(); }

}  // extern "C"
