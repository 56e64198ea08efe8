#include "npy.h"

#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <stdexcept>

namespace gapa_run {
namespace {

/// The text between `open` and `close` that follows 'key': in the header's Python literal.
std::string field(const std::string& header, const std::string& key, char open, char close) {
  const size_t at = header.find("'" + key + "':");
  if (at == std::string::npos) return "";
  const size_t first = header.find(open, at + key.size() + 3);
  if (first == std::string::npos) return "";
  const size_t last = header.find(close, first + 1);
  return last == std::string::npos ? "" : header.substr(first + 1, last - first - 1);
}

std::vector<int64_t> parse_shape(const std::string& text, const std::string& path) {
  std::vector<int64_t> shape;
  for (size_t at = 0; at < text.size();) {
    if (text[at] == ' ' || text[at] == ',') {
      ++at;
      continue;
    }
    size_t used = 0;
    try {
      shape.push_back(std::stoll(text.substr(at), &used));
    } catch (const std::exception&) {
      throw std::runtime_error(path + " has an unreadable shape (" + text + ").");
    }
    if (shape.back() < 0) throw std::runtime_error(path + " has a negative dimension.");
    at += used;
  }
  return shape;
}

template <typename T>
std::vector<double> widen(const char* bytes, size_t count) {
  std::vector<double> values(count);
  for (size_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, bytes + i * sizeof(T), sizeof(T));
    values[i] = value;
  }
  return values;
}

}  // namespace

Array read_npy(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot open " + path + ".");
  const std::string bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  // Magic, two version bytes, then the header's length: 2 bytes in version 1, 4 in later ones.
  if (bytes.size() < 10 || bytes.compare(0, 6, "\x93NUMPY") != 0) {
    throw std::runtime_error(path + " is not an .npy file.");
  }
  const int length_bytes = bytes[6] == 1 ? 2 : 4;
  const size_t start = 8 + length_bytes;
  if (bytes.size() < start) throw std::runtime_error(path + " is cut off in its header.");
  size_t length = 0;
  for (int i = length_bytes - 1; i >= 0; --i) {
    length = length << 8 | static_cast<unsigned char>(bytes[8 + i]);
  }
  if (bytes.size() - start < length) {
    throw std::runtime_error(path + " is cut off in its header.");
  }
  const std::string header = bytes.substr(start, length);

  const std::string type = field(header, "descr", '\'', '\'');
  if (type != "<f4" && type != "<f8") {
    throw std::runtime_error(path + " holds '" + type +
                             "'; little-endian float32 ('<f4') or float64 ('<f8') is needed.");
  }
  if (header.find("'fortran_order': False") == std::string::npos) {
    throw std::runtime_error(path + " is in Fortran order; save numpy.ascontiguousarray(x).");
  }
  Array array;
  array.shape = parse_shape(field(header, "shape", '(', ')'), path);
  const size_t width = type == "<f4" ? 4 : 8;
  const size_t available = (bytes.size() - start - length) / width;
  size_t count = 1;
  for (const int64_t dim : array.shape) {
    if (dim != 0 && count > std::numeric_limits<size_t>::max() / dim) {
      throw std::runtime_error(path + " has an impossible shape.");
    }
    count *= dim;
  }
  if (count > available) {
    throw std::runtime_error(path + " is cut off: its shape needs " + std::to_string(count) +
                             " numbers, but it holds " + std::to_string(available) + ".");
  }
  const char* data = bytes.data() + start + length;
  array.values = width == 4 ? widen<float>(data, count) : widen<double>(data, count);
  return array;
}

}  // namespace gapa_run
