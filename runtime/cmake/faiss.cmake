# FAISS and Eigen from their sources, where no package has them: what the wheels are built of.
#
# The archives are those of Debian's source packages, faiss 1.7.3-2 and eigen3 3.4.0-4 (`apt-get source faiss`), by
# their checksums, from the mirror that apt uses or GAPA_DEBIAN_MIRROR names. Where there is no network,
# -DFETCHCONTENT_SOURCE_DIR_FAISS= and …_EIGEN= name unpacked ones.
cmake_minimum_required(VERSION 3.24)
include(FetchContent)

set(GAPA_DEBIAN_MIRROR "" CACHE STRING "Address of a Debian mirror; that of apt where it is empty")
set(mirror "${GAPA_DEBIAN_MIRROR}")
if(NOT mirror)
  execute_process(COMMAND apt-get indextargets --format "$(REPO_URI)" "Created-By: Packages"
    OUTPUT_VARIABLE mirrors ERROR_QUIET)
  string(REGEX MATCH "[^\n]+/debian/" mirror "${mirrors}")
  if(NOT mirror)
    message(FATAL_ERROR "No Debian mirror is known here: give -DGAPA_DEBIAN_MIRROR=, or unpacked sources.")
  endif()
endif()
string(REGEX REPLACE "/+$" "" mirror "${mirror}")
string(APPEND mirror "/pool/main/")

FetchContent_Declare(faiss
  URL ${mirror}f/faiss/faiss_1.7.3.orig.tar.gz
  URL_HASH SHA256=3e4fac26d8c9e9008ecea4ae5fc414c658998fce4ba75835058b1a71d3516002
  SOURCE_SUBDIR nothing-to-add
  DOWNLOAD_EXTRACT_TIMESTAMP TRUE)
FetchContent_Declare(eigen
  URL ${mirror}e/eigen3/eigen3_3.4.0.orig.tar.bz2
  URL_HASH SHA256=b4c198460eba6f28d34894e3a5710998818515104d6e74e5cc331ce31e46e626
  SOURCE_SUBDIR nothing-to-add
  DOWNLOAD_EXTRACT_TIMESTAMP TRUE)
FetchContent_MakeAvailable(faiss eigen)

# What assembles and searches an index. Left out are files and everything that is read from them (index_io, on-disk
# lists), the kinds that we do not have, GPUs, and variants for other instruction sets: src/simd/ has these.
set(parts
  Clustering Index Index2Layer IndexFlat IndexFlatCodes IndexHNSW IndexIVF IndexIVFPQ IndexPQ IndexScalarQuantizer
  VectorTransform
  impl/AuxIndexStructures impl/FaissException impl/HNSW impl/IDSelector impl/kmeans1d impl/PolysemousTraining impl/ProductQuantizer
  impl/ScalarQuantizer
  invlists/DirectMap invlists/InvertedLists
  utils/Heap utils/distances utils/distances_simd utils/extra_distances utils/hamming utils/partitioning utils/random
  utils/utils)
list(TRANSFORM parts PREPEND "${faiss_SOURCE_DIR}/faiss/")
list(TRANSFORM parts APPEND ".cpp")

add_library(faiss OBJECT ${parts})
target_include_directories(faiss SYSTEM PUBLIC ${faiss_SOURCE_DIR})
# A team of one: without OpenMP its pragmas are comments, and compat/omp.h says so.
target_include_directories(faiss SYSTEM PUBLIC compat)
target_compile_definitions(faiss PRIVATE FINTEGER=int)
target_compile_options(faiss PRIVATE -w -ffp-contract=off ${HARDENING})
# src/squared_distance.cc has the distance that other files call.
set_source_files_properties(${faiss_SOURCE_DIR}/faiss/utils/distances_simd.cpp PROPERTIES
  COMPILE_DEFINITIONS fvec_L2sqr=fvec_L2sqr_as_written)

add_library(eigen INTERFACE)
target_include_directories(eigen SYSTEM INTERFACE ${eigen_SOURCE_DIR})

if(WIN32)
  target_compile_options(faiss PUBLIC "SHELL:-include faiss/impl/platform_macros.h"
    "SHELL:-include ${CMAKE_CURRENT_SOURCE_DIR}/compat/aligned_memory.h")
endif()
