# What is linked into the library: its versions, found here, and its licences. This is the one list; every build that
# includes this file after FAISS and Eigen have been found leaves build/…/gapa-onnx-runtime.cdx.json, a CycloneDX document of it
# without dates, the same for the same build. The texts of the licences are in licences/, and pyproject.toml names them.
set(GAPA_COMPONENTS)

# component(<name> <version> <licence> <purl>): all of its words may be used in JSON as they are.
macro(component name version licence purl)
  list(APPEND GAPA_COMPONENTS ${name})
  set(GAPA_${name} "${version}" "${licence}" "${purl}")
endmacro()

# The numbers of a version that a header defines.
function(version_in header variable)
  file(READ ${header} text)
  set(numbers)
  foreach(macro ${ARGN})
    if(NOT text MATCHES "#define ${macro} ([0-9]+)")
      message(FATAL_ERROR "${header} does not define ${macro}: what is linked has no version to tell.")
    endif()
    list(APPEND numbers ${CMAKE_MATCH_1})
  endforeach()
  list(JOIN numbers "." numbers)
  set(${variable} ${numbers} PARENT_SCOPE)
endfunction()

# Where the headers are: unpacked sources, or what was found on the system.
if(faiss_SOURCE_DIR)
  set(faiss_headers ${faiss_SOURCE_DIR})
else()
  set(faiss_headers ${FAISS_INCLUDE_DIR})
endif()
if(eigen_SOURCE_DIR)
  set(eigen_headers ${eigen_SOURCE_DIR})
else()
  get_target_property(eigen_headers Eigen3::Eigen INTERFACE_INCLUDE_DIRECTORIES)
endif()
version_in(${faiss_headers}/faiss/Index.h faiss_version FAISS_VERSION_MAJOR FAISS_VERSION_MINOR FAISS_VERSION_PATCH)
version_in(${eigen_headers}/Eigen/src/Core/util/Macros.h eigen_version
  EIGEN_WORLD_VERSION EIGEN_MAJOR_VERSION EIGEN_MINOR_VERSION)
component(faiss ${faiss_version} "MIT" "pkg:github/facebookresearch/faiss@v${faiss_version}")
component(eigen ${eigen_version} "MPL-2.0" "pkg:gitlab/libeigen/eigen@${eigen_version}")

# The C++ library, where it is linked and not loaded: that of GCC, or those of Zig.
if(ZIG)
  set(llvm "Apache-2.0 WITH LLVM-exception")
  foreach(part libcxx libcxxabi libunwind)
    component(${part} ${CMAKE_CXX_COMPILER_VERSION} "${llvm}"
      "pkg:github/llvm/llvm-project@llvmorg-${CMAKE_CXX_COMPILER_VERSION}#${part}")
  endforeach()
  execute_process(COMMAND ${ZIG} version OUTPUT_VARIABLE zig_version OUTPUT_STRIP_TRAILING_WHITESPACE)
  component(zig-compiler-rt "${zig_version}" "MIT" "pkg:github/ziglang/zig@${zig_version}#lib/compiler_rt")
elseif(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  foreach(part libstdc++ libgcc)
    component(${part} ${CMAKE_CXX_COMPILER_VERSION} "GPL-3.0-or-later WITH GCC-exception-3.1"
      "pkg:generic/gcc@${CMAKE_CXX_COMPILER_VERSION}#${part}")
  endforeach()
endif()

file(STRINGS ${CMAKE_CURRENT_LIST_DIR}/../pyproject.toml ours REGEX "^version = ")
string(REGEX REPLACE "^version = \"(.*)\"$" "\\1" ours "${ours}")
set(root "pkg:pypi/gapa-onnx-runtime@${ours}")
set(components)
set(references)
foreach(name ${GAPA_COMPONENTS})
  list(GET GAPA_${name} 0 version)
  list(GET GAPA_${name} 1 licence)
  list(GET GAPA_${name} 2 purl)
  set(told "{\"license\": {\"id\": \"${licence}\"}}")
  if(licence MATCHES " ")
    set(told "{\"expression\": \"${licence}\"}")
  endif()
  list(APPEND components "    {\"type\": \"library\", \"bom-ref\": \"${purl}\", \"name\": \"${name}\", \
\"version\": \"${version}\", \"purl\": \"${purl}\", \"licenses\": [${told}]}")
  list(APPEND references "\"${purl}\"")
endforeach()
list(JOIN components ",\n" components)
list(JOIN references ", " references)
string(UUID serial NAMESPACE 6ba7b811-9dad-11d1-80b4-00c04fd430c8 NAME "${root} ${CMAKE_SYSTEM_NAME} \
${CMAKE_SYSTEM_PROCESSOR} ${components}" TYPE SHA1)
file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/gapa-onnx-runtime.cdx.json "{
  \"bomFormat\": \"CycloneDX\",
  \"specVersion\": \"1.6\",
  \"serialNumber\": \"urn:uuid:${serial}\",
  \"version\": 1,
  \"metadata\": {
    \"lifecycles\": [{\"phase\": \"build\"}],
    \"component\": {\"type\": \"library\", \"bom-ref\": \"${root}\", \"name\": \"gapa-onnx-runtime\", \"version\": \"${ours}\", \
\"purl\": \"${root}\", \"licenses\": [{\"license\": {\"id\": \"Apache-2.0\"}}]}
  },
  \"components\": [
${components}
  ],
  \"dependencies\": [{\"ref\": \"${root}\", \"dependsOn\": [${references}]}]
}
")
if(SKBUILD_METADATA_DIR)  # of the wheel that is being built
  install(FILES ${CMAKE_CURRENT_BINARY_DIR}/gapa-onnx-runtime.cdx.json DESTINATION ${SKBUILD_METADATA_DIR}/sboms)
endif()
