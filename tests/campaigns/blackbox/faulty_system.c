/* Stands between a server and its C library (LD_PRELOAD), so that its disk and its clock can be made to fail from outside, without root.
 *
 * A file that BLACKBOX_CONTROL names is shared with the campaign, which writes there what is to happen. Only what is written below the
 * folder BLACKBOX_FOLDER is struck: sockets, pipes and logs are not.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

struct control {
    volatile int64_t clock;      /* seconds by which the wall clock is ahead */
    volatile int32_t write_error; /* what a write fails with; 0: nothing */
    volatile int32_t sync_error;
    volatile int32_t delay;      /* microseconds by which a write and a sync come late */
    volatile int32_t struck;     /* how many calls were */
};

static struct control nothing;
static struct control *control = &nothing;
static char folder[PATH_MAX];

__attribute__((constructor)) static void attach(void)
{
    const char *path = getenv("BLACKBOX_CONTROL"), *below = getenv("BLACKBOX_FOLDER");
    int file = path == NULL ? -1 : open(path, O_RDWR | O_CLOEXEC);
    if (file < 0 || below == NULL)
        return;
    void *shared = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (shared != MAP_FAILED) {
        snprintf(folder, sizeof folder, "%s/", below);
        control = shared;
    }
}

/* Whether a file lies below the folder. */
static int is_ours(int file)
{
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return strncmp(path, folder, strlen(folder)) == 0;
}

/* Wait as a slow disk would; the error with which the call is to fail, or 0. */
static int befalls(int file, int error)
{
    int delay = control->delay;
    if ((error == 0 && delay == 0) || !is_ours(file))
        return 0;
    int saved = errno;
    if (delay)
        usleep(delay);
    errno = saved;
    __sync_fetch_and_add(&control->struck, 1);
    return error;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define UNLESS_STRUCK(file, kind, name, call)           \
    static __typeof__(&name) real;                      \
    if (real == NULL)                                   \
        real = REAL(name);                              \
    int error = befalls(file, control->kind##_error);   \
    if (error) {                                        \
        errno = error;                                  \
        return -1;                                      \
    }                                                   \
    return call;

ssize_t write(int file, const void *data, size_t size) { UNLESS_STRUCK(file, write, write, real(file, data, size)) }

ssize_t pwrite(int file, const void *data, size_t size, off_t at) { UNLESS_STRUCK(file, write, pwrite, real(file, data, size, at)) }

ssize_t pwrite64(int file, const void *data, size_t size, off64_t at) { UNLESS_STRUCK(file, write, pwrite64, real(file, data, size, at)) }

int ftruncate(int file, off_t size) { UNLESS_STRUCK(file, write, ftruncate, real(file, size)) }

int ftruncate64(int file, off64_t size) { UNLESS_STRUCK(file, write, ftruncate64, real(file, size)) }

int fsync(int file) { UNLESS_STRUCK(file, sync, fsync, real(file)) }

int fdatasync(int file) { UNLESS_STRUCK(file, sync, fdatasync, real(file)) }

int clock_gettime(clockid_t clock, struct timespec *time)
{
    static __typeof__(&clock_gettime) real;
    if (real == NULL)
        real = REAL(clock_gettime);
    int failed = real(clock, time);
    if (!failed && clock == CLOCK_REALTIME)
        time->tv_sec += control->clock;
    return failed;
}
