#!/bin/bash -eu
# $CXXFLAGS brings the sanitizer, $LIB_FUZZING_ENGINE the fuzzer.
cmake -S tests/fuzz/native -B "$WORK/fuzz" -DGAPA_FUZZ=none -DGAPA_FUZZ_ENGINE="$LIB_FUZZING_ENGINE"
cmake --build "$WORK/fuzz" --target gapa_fuzz_target "-j$(nproc)"
cp "$WORK/fuzz/gapa_fuzz_target" "$OUT/operators"
