// Reading NumPy's .npy files: float32 or float64, little-endian, C order.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace gapa_run {

struct Array {
  std::vector<int64_t> shape;
  std::vector<double> values;  ///< exact for both types that are read
};

/// Throws std::runtime_error with a sentence that names the file.
Array read_npy(const std::string& path);

}  // namespace gapa_run
