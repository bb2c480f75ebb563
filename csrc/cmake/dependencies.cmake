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

# Warnings in the headers of a download are not ours.
function(sparsecomm_system_headers target)
  get_target_property(include_dirs ${target} INTERFACE_INCLUDE_DIRECTORIES)
  set_target_properties(${target} PROPERTIES INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${include_dirs}")
endfunction()

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
  sparsecomm_system_headers(hwy)
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

# For the rest of the aggregator: HTTP, JSON, its settings and its log. The libraries of headers are used as such, so that the
# program needs none of them where it runs.
find_path(LIBEVENT_INCLUDE_DIR event2/http.h)
find_library(LIBEVENT_CORE_LIBRARY NAMES libevent_core.a event_core)
find_library(LIBEVENT_EXTRA_LIBRARY NAMES libevent_extra.a event_extra)
if(LIBEVENT_INCLUDE_DIR AND LIBEVENT_CORE_LIBRARY AND LIBEVENT_EXTRA_LIBRARY)
  add_library(libevent::extra UNKNOWN IMPORTED GLOBAL)
  set_target_properties(libevent::extra PROPERTIES
    IMPORTED_LOCATION "${LIBEVENT_EXTRA_LIBRARY}"
    INTERFACE_INCLUDE_DIRECTORIES "${LIBEVENT_INCLUDE_DIR}"
    INTERFACE_LINK_LIBRARIES "${LIBEVENT_CORE_LIBRARY}")
else()
  foreach(part OPENSSL MBEDTLS BENCHMARK TESTS REGRESS SAMPLES THREAD_SUPPORT)
    set(EVENT__DISABLE_${part} ON CACHE INTERNAL "")
  endforeach()
  set(EVENT__LIBRARY_TYPE STATIC CACHE INTERNAL "")
  set(CMAKE_POLICY_VERSION_MINIMUM 3.5)  # it asks for less than CMake 4 takes
  sparsecomm_fetch(libevent
    https://github.com/libevent/libevent/releases/download/release-2.1.12-stable/libevent-2.1.12-stable.tar.gz
    92e6de1be9ec176428fd2367677e61ceffc2ee1cb119035037a27d346b0403bb)
  add_library(libevent::extra INTERFACE IMPORTED GLOBAL)
  target_link_libraries(libevent::extra INTERFACE event_extra_static event_core_static)
  target_include_directories(libevent::extra SYSTEM INTERFACE
    ${libevent_SOURCE_DIR}/include ${libevent_BINARY_DIR}/include)
endif()

# Makes a target of headers that the system has; leaves it undefined where it has not.
function(sparsecomm_import_headers target header)
  string(MAKE_C_IDENTIFIER "SPARSECOMM_${target}_DIR" dir)
  find_path(${dir} ${header})
  if(${dir})
    add_library(${target} INTERFACE IMPORTED GLOBAL)
    target_include_directories(${target} SYSTEM INTERFACE ${${dir}})
  endif()
endfunction()

sparsecomm_import_headers(nlohmann_json::nlohmann_json nlohmann/json.hpp)
if(NOT TARGET nlohmann_json::nlohmann_json)
  sparsecomm_fetch(nlohmann_json https://github.com/nlohmann/json/releases/download/v3.11.3/json.tar.xz
    d6c65aca6b1ed68e7a182f4757257b107ae403032760ed6ef121c9d55e81757d)
  sparsecomm_system_headers(nlohmann_json)
endif()
sparsecomm_import_headers(tomlplusplus::tomlplusplus toml++/toml.h)
if(NOT TARGET tomlplusplus::tomlplusplus)
  sparsecomm_fetch(tomlplusplus https://github.com/marzer/tomlplusplus/archive/refs/tags/v3.4.0.tar.gz
    8517f65938a4faae9ccf8ebb36631a38c1cadfb5efa85d9a72e15b9e97d25155)
  sparsecomm_system_headers(tomlplusplus_tomlplusplus)
endif()
# A distribution's spdlog takes fmt from a package of its own.
sparsecomm_import_headers(fmt::fmt-header-only fmt/format.h)
sparsecomm_import_headers(spdlog::spdlog_header_only spdlog/spdlog.h)
if(TARGET spdlog::spdlog_header_only)
  target_compile_definitions(spdlog::spdlog_header_only INTERFACE SPDLOG_HEADER_ONLY)
  find_path(SPDLOG_BUNDLED_FMT spdlog/fmt/bundled/core.h)
  if(TARGET fmt::fmt-header-only AND NOT SPDLOG_BUNDLED_FMT)
    target_compile_definitions(spdlog::spdlog_header_only INTERFACE SPDLOG_FMT_EXTERNAL FMT_HEADER_ONLY)
  endif()
else()
  sparsecomm_fetch(spdlog https://github.com/gabime/spdlog/archive/refs/tags/v1.17.0.tar.gz
    d8862955c6d74e5846b3f580b1605d2428b11d97a410d86e2fb13e857cd3a744)
  sparsecomm_system_headers(spdlog_header_only)
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
