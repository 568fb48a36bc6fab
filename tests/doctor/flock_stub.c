/* A file system without locks: flock() as NFS mounted with a lock server that does not answer. */
#include <errno.h>

int flock(int descriptor, int operation) {
  (void)descriptor;
  (void)operation;
  errno = ENOLCK;
  return -1;
}
