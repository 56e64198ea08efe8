// The operator: validate at session load, then answer queries.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "gapa/ort_abi.h"
#include "gapa_activation/index.h"
#include "gapa_activation/local.h"
#include "gapa_activation/parameters.h"
#include "operator.h"

namespace gapa {

/// One class for all kinds; they differ in their index only.
///
/// The answer to a query depends on that query and the index alone, bit for bit: not on the batch,
/// the position in it, the number of threads or the optimisation level.
class ActivationKernel : public Kernel {
 public:
  /// The parameters' tensors must outlive the kernel.
  ActivationKernel(const ort::Api* api, const OpSchema& schema, const Parameters& parameters);

  void compute(ort::KernelContext* context) const override;

 private:
  using Rows = std::vector<int64_t>;

  /// The queries that have an answer, and where in the whole batch they stand.
  struct Batch {
    std::vector<const float*> queries;
    std::vector<int64_t> position;
  };
  Batch finite_ones(const float* queries, int64_t begin, int64_t end) const;

  /// Ranks the candidates of each query and solves; writes to the places of the queries.
  void answer(const Batch& batch, const std::vector<Rows>& candidates, float* s,
              int64_t* neighbours) const;

  /// The same where the neighbours are those of the nearest candidate.
  void answer_locally(const Batch& batch, const std::vector<Rows>& candidates, float* s,
                      int64_t* neighbours) const;

  int64_t k_, dim_;
  double length_scale_, jitter_;
  std::unique_ptr<const Index> index_;
  std::unique_ptr<const LocalFactors> local_;  ///< nullptr for the other kinds
};

/// For points that the graph itself computes, from a smaller format in which the file stores them.
/// Where onnxruntime folds constants there are none; where that is switched off the points come
/// with every run, and what is made of them lasts for that run.
class UnfoldedKernel : public Kernel {
 public:
  UnfoldedKernel(const ort::Api* api, const OpSchema& schema, IndexKind kind)
      : Kernel(api, schema.name), schema_(schema), kind_(kind) {}

  void compute(ort::KernelContext* context) const override;

 private:
  const OpSchema& schema_;
  IndexKind kind_;
};

}  // namespace gapa
