// Between onnxruntime's status codes and C++ exceptions.
#pragma once

#include <exception>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "gapa/ort_abi.h"

namespace gapa {

/// A model that cannot be run as it is; the message is one sentence for its user.
struct ModelError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Turns a failed call into onnxruntime into an exception.
inline void check(const ort::Api* api, ort::Status* status) {
  if (status == nullptr) return;
  // Held, since there may be no memory for a message.
  const auto release = [api](ort::Status* held) { ort::ReleaseStatus(api, held); };
  const std::unique_ptr<ort::Status, decltype(release)> held(status, release);
  throw ModelError(ort::GetErrorMessage(api, status));
}

/// Runs `body` and turns whatever it throws into a status: no exception crosses the C boundary.
template <typename Body>
ort::Status* guarded(const ort::Api* api, const char* op_name, const Body& body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const ModelError& error) {
    return ort::CreateStatus(api, ort::kInvalidArgument, error.what());
  } catch (const std::bad_alloc&) {
    return ort::CreateStatus(api, ort::kFail, "ai.gapa: there is not enough memory for the index.");
  } catch (const std::exception& error) {
    try {
      const std::string message = std::string(op_name) + ": " + error.what();
      return ort::CreateStatus(api, ort::kFail, message.c_str());
    } catch (...) {
    }
  } catch (...) {
  }
  return ort::CreateStatus(api, ort::kFail, "ai.gapa: an unknown error occurred.");
}

}  // namespace gapa
