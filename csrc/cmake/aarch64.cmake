# For Debian's cross compiler, with programs run under an emulator: make test-neon.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64)
set(ENV{PKG_CONFIG_LIBDIR} /usr/lib/aarch64-linux-gnu/pkgconfig)  # not this machine's own libraries
# Debian has libevent-dev for one architecture at a time: the libraries of the other, with the same headers.
foreach(part CORE EXTRA)
  string(TOLOWER ${part} name)
  set(library /usr/lib/aarch64-linux-gnu/libevent_${name}-2.1.so.7)
  if(EXISTS ${library})
    set(LIBEVENT_${part}_LIBRARY ${library} CACHE FILEPATH "")
  endif()
endforeach()
