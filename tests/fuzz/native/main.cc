// gapa_fuzz --first SEED --count N [--seconds T] [--threads N] [--show]
//
// Runs the cases of N seeds in a row and prints how they ended, as JSON. A case that breaks a
// promise ends the process; its seed is the last thing that is said, and `--first SEED --count 1`
// repeats it.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "cases.h"
#include "check.h"

extern "C" void __sanitizer_set_death_callback(void (*callback)()) __attribute__((weak));
extern "C" const char* __asan_default_options() {
  return "allocator_may_return_null=1:handle_abort=1:detect_leaks=1:detect_stack_use_after_return="
         "0:"
         "quarantine_size_mb=4:malloc_context_size=4:max_malloc_fill_size=512";
}
extern "C" const char* __ubsan_default_options() { return "abort_on_error=1:print_stacktrace=1"; }
extern "C" const char* __tsan_default_options() { return "abort_on_error=1:halt_on_error=1"; }

namespace {

uint64_t at_hand = 0;
uint64_t done = 0;

void tell() { std::fprintf(stderr, "\nseed %llu\n", static_cast<unsigned long long>(at_hand)); }

void describe(const gapa::fuzz::Case& one) {
  constexpr int64_t kMost = 64;
  std::fprintf(stderr, "%s: %s\n", gapa::fuzz::kOperators[one.op],
               one.sound ? "nothing is wrong with it" : one.damage.c_str());
  for (const gapa::fuzz::Operand& input : one.inputs) {
    std::fprintf(stderr, "  %s%s(", input.missing ? "missing " : "",
                 input.constant ? "constant " : "");
    for (const int64_t dim : input.value.shape)
      std::fprintf(stderr, "%lld,", static_cast<long long>(dim));
    std::fprintf(stderr, ")");
    const int64_t count = input.value.bytes == 0 ? 0 : std::min(input.value.count(), kMost);
    for (int64_t i = 0; i < count; ++i) {
      const gapa::ort::Value& value = input.value;
      if (value.type == gapa::ort::kFloat) std::fprintf(stderr, " %.9g", value.as<float>()[i]);
      if (value.type == gapa::ort::kInt32) std::fprintf(stderr, " %d", value.as<int32_t>()[i]);
      if (value.type == gapa::ort::kInt64) {
        std::fprintf(stderr, " %lld", static_cast<long long>(value.as<int64_t>()[i]));
      }
    }
    std::fprintf(stderr, "\n");
  }
}

struct Tally {
  uint64_t sound = 0;
  std::array<uint64_t, 4> outcomes{};
};

}  // namespace

int main(int count_of_arguments, char** arguments) {
  uint64_t first = 0, count = 1;
  double seconds = 1e9;
  int threads = 0;
  bool show = false;
  for (int i = 1; i < count_of_arguments; ++i) {
    const std::string name = arguments[i];
    const char* const value = i + 1 < count_of_arguments ? arguments[i + 1] : "";
    if (name == "--show") {
      show = true;
      continue;
    }
    ++i;
    if (name == "--first") first = std::strtoull(value, nullptr, 0);
    if (name == "--count") count = std::strtoull(value, nullptr, 0);
    if (name == "--seconds") seconds = std::strtod(value, nullptr);
    if (name == "--threads") threads = std::atoi(value);
  }
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(tell);

  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  std::array<Tally, gapa::fuzz::kOperatorCount> tallies;
  for (; done < count; ++done) {
    if (done % 256 == 0 && elapsed() > seconds) break;
    at_hand = first + done;
    gapa::fuzz::Random random(at_hand * 0x9e3779b97f4a7c15u);
    const gapa::fuzz::Case one = gapa::fuzz::make_case(random);
    if (show) describe(one);
    const gapa::fuzz::Answer answer = gapa::fuzz::check(one, threads);
    if (show) {
      std::fprintf(stderr, "%s. %s\n", gapa::fuzz::kOutcomes[static_cast<int>(answer.outcome)],
                   answer.message.c_str());
    }
    Tally& tally = tallies[one.op];
    tally.sound += one.sound;
    ++tally.outcomes[static_cast<size_t>(answer.outcome)];
  }
  std::printf("{\"first\": %llu, \"done\": %llu, \"seconds\": %.3f, \"operators\": {",
              static_cast<unsigned long long>(first), static_cast<unsigned long long>(done),
              elapsed());
  for (size_t op = 0; op < tallies.size(); ++op) {
    std::printf("%s\"%s\": {\"sound\": %llu", op == 0 ? "" : ", ", gapa::fuzz::kOperators[op],
                static_cast<unsigned long long>(tallies[op].sound));
    for (size_t outcome = 0; outcome < tallies[op].outcomes.size(); ++outcome) {
      std::printf(", \"%s\": %llu", gapa::fuzz::kOutcomes[outcome],
                  static_cast<unsigned long long>(tallies[op].outcomes[outcome]));
    }
    std::printf("}");
  }
  std::printf("}}\n");
  return 0;
}
