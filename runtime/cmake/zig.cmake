# One compiler for every platform: `zig c++` of the Python package ziglang, with its own C and C++ libraries.
#
#   cmake -S runtime -B build/… -DCMAKE_TOOLCHAIN_FILE=runtime/cmake/zig.cmake -DZIG=…/zig -DZIG_TARGET=aarch64-linux-gnu.2.28
if(NOT ZIG OR NOT ZIG_TARGET)
  message(FATAL_ERROR "The toolchain needs -DZIG=, the program, and -DZIG_TARGET=, such as x86_64-linux-gnu.2.28.")
endif()
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES ZIG ZIG_TARGET)

string(REGEX MATCH "^[^-]+" CMAKE_SYSTEM_PROCESSOR "${ZIG_TARGET}")
if(ZIG_TARGET MATCHES "-linux-")
  set(CMAKE_SYSTEM_NAME Linux)
elseif(ZIG_TARGET MATCHES "-macos")
  set(CMAKE_SYSTEM_NAME Darwin)
elseif(ZIG_TARGET MATCHES "-windows-")
  set(CMAKE_SYSTEM_NAME Windows)
else()
  message(FATAL_ERROR "The toolchain knows targets of linux, macos and windows, not ${ZIG_TARGET}.")
endif()

set(CMAKE_CXX_COMPILER "${ZIG}" c++ -target "${ZIG_TARGET}")
set(CMAKE_CXX_COMPILER_WORKS TRUE)       # trying it takes a link of all of its C++ library
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE NEVER)
set(CMAKE_CXX_LINKER_DEPFILE_SUPPORTED FALSE)  # its linker has no --dependency-file
