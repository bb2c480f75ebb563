# Highway, Mbed TLS and, for the tests, GoogleTest. Each is taken from the first of: a CMake package of the system,
# pkg-config, a download whose hash is pinned here. Afterwards the targets hwy::hwy, MbedTLS::mbedcrypto and
# GTest::gtest_main exist, and MPI::MPI_CXX where there is an MPI.
include(FetchContent)
find_package(PkgConfig QUIET)

# Makes an imported target of what pkg-config knows as `module`; leaves it undefined where that is nothing.
# The target is one file, so that $<TARGET_FILE> works on it as on a CMake package's.
function(sparsecomm_import_pkg_config target module)
  if(NOT PKG_CONFIG_FOUND)
    return()
  endif()
  string(MAKE_C_IDENTIFIER "SPARSECOMM_${module}" prefix)
  pkg_check_modules(${prefix} QUIET ${module})
  if(NOT ${prefix}_FOUND)
    return()
  endif()
  list(GET ${prefix}_LINK_LIBRARIES 0 file)
  list(REMOVE_AT ${prefix}_LINK_LIBRARIES 0)
  add_library(${target} UNKNOWN IMPORTED GLOBAL)
  set_target_properties(${target} PROPERTIES
    IMPORTED_LOCATION "${file}"
    INTERFACE_INCLUDE_DIRECTORIES "${${prefix}_INCLUDE_DIRS}"
    INTERFACE_COMPILE_OPTIONS "${${prefix}_CFLAGS_OTHER}"
    INTERFACE_LINK_LIBRARIES "${${prefix}_LINK_LIBRARIES}")
endfunction()

# Declares a download and adds it to the build.
macro(sparsecomm_fetch name url sha256)
  message(STATUS "${name}: not installed; fetching ${url}")
  if(POLICY CMP0135)
    cmake_policy(SET CMP0135 NEW)
  endif()
  FetchContent_Declare(${name} URL ${url} URL_HASH SHA256=${sha256})
  FetchContent_MakeAvailable(${name})
endmacro()

find_package(hwy CONFIG QUIET)
if(NOT TARGET hwy::hwy)
  sparsecomm_import_pkg_config(hwy::hwy libhwy)
endif()
if(NOT TARGET hwy::hwy)
  set(HWY_ENABLE_CONTRIB OFF CACHE INTERNAL "")
  set(HWY_ENABLE_EXAMPLES OFF CACHE INTERNAL "")
  set(HWY_ENABLE_INSTALL OFF CACHE INTERNAL "")
  set(HWY_ENABLE_TESTS OFF CACHE INTERNAL "")
  set(HWY_FORCE_STATIC_LIBS ON CACHE INTERNAL "")
  sparsecomm_fetch(highway https://github.com/google/highway/archive/refs/tags/1.2.0.tar.gz
    7e0be78b8318e8bdbf6fa545d2ecb4c90f947df03f7aadc42c1967f019e63343)
  get_target_property(include_dirs hwy INTERFACE_INCLUDE_DIRECTORIES)
  set_target_properties(hwy PROPERTIES INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${include_dirs}")
  add_library(hwy::hwy ALIAS hwy)
endif()

# For the aggregator's tokens. Releases before 3 install no CMake package.
find_package(MbedTLS CONFIG QUIET)
if(NOT TARGET MbedTLS::mbedcrypto)
  find_path(MBEDTLS_INCLUDE_DIR mbedtls/md.h)
  find_library(MBEDCRYPTO_LIBRARY NAMES libmbedcrypto.a mbedcrypto)
  if(MBEDTLS_INCLUDE_DIR AND MBEDCRYPTO_LIBRARY)
    add_library(MbedTLS::mbedcrypto UNKNOWN IMPORTED GLOBAL)
    set_target_properties(MbedTLS::mbedcrypto PROPERTIES
      IMPORTED_LOCATION "${MBEDCRYPTO_LIBRARY}"
      INTERFACE_INCLUDE_DIRECTORIES "${MBEDTLS_INCLUDE_DIR}")
  endif()
endif()
if(NOT TARGET MbedTLS::mbedcrypto)
  set(ENABLE_PROGRAMS OFF CACHE INTERNAL "")
  set(ENABLE_TESTING OFF CACHE INTERNAL "")
  sparsecomm_fetch(mbedtls
    https://github.com/Mbed-TLS/mbedtls/releases/download/mbedtls-3.6.7/mbedtls-3.6.7.tar.bz2
    a7e8bcbec0e6f761b4af24f25677626b35f762f68eef79c08677a363212d11f6)
endif()

# UCX's headers, where there are any: the system's, else those of the wheel libucx-cu13 beside the interpreter.
find_path(UCX_INCLUDE_DIR ucp/api/ucp.h)
if(NOT UCX_INCLUDE_DIR)
  set(Python3_FIND_VIRTUALENV FIRST)
  find_package(Python3 QUIET COMPONENTS Interpreter)
  if(Python3_Interpreter_FOUND)
    execute_process(
      COMMAND ${Python3_EXECUTABLE} -c
        "from importlib.util import find_spec; print(find_spec('libucx').submodule_search_locations[0])"
      OUTPUT_VARIABLE wheel OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    find_path(UCX_INCLUDE_DIR ucp/api/ucp.h PATHS "${wheel}/include" NO_DEFAULT_PATH)
  endif()
endif()
if(NOT UCX_INCLUDE_DIR)
  message(STATUS "UCX: no headers, so the transport ucx is left out; "
    "pip install libucx-cu13, or install your system's libucx-dev")
endif()

if(SPARSECOMM_BUILD_TESTS)
  find_package(GTest QUIET)
  if(NOT TARGET GTest::gtest_main)
    sparsecomm_import_pkg_config(GTest::gtest_main gtest_main)
  endif()
  if(NOT TARGET GTest::gtest_main)
    set(BUILD_GMOCK OFF CACHE INTERNAL "")
    set(INSTALL_GTEST OFF CACHE INTERNAL "")
    sparsecomm_fetch(googletest https://github.com/google/googletest/archive/refs/tags/v1.14.0.tar.gz
      8ad598c73ad796e0d8280b082cebd82a630d73e73cd3c70057938a6501bba5d7)
  endif()
endif()

set(MPI_CXX_SKIP_MPICXX ON)  # its C++ interface was removed from MPI in 2012
find_package(MPI QUIET COMPONENTS CXX)
if(NOT MPI_CXX_FOUND)
  message(STATUS "no mpicxx on PATH: building without the MPI transport")
endif()

# nvcc: on PATH, or in CUDACXX.
option(SPARSECOMM_CUDA "Build the CUDA kernels where there is an nvcc" ON)
if(SPARSECOMM_CUDA AND NOT SPARSECOMM_SANITIZE)
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    if(CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
      set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE})
    endif()
    set(CMAKE_CUDA_ARCHITECTURES 80)  # each target has its own
    enable_language(CUDA)
    if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # a CMake older than nvcc's C++20
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    endif()
  else()
    message(STATUS "no nvcc on PATH: building without the CUDA kernels")
  endif()
endif()
