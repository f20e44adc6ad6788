// A stand-in for NVIDIA's kernel module: it has the name and the version and does nothing. DKMS builds it for real.
#include <linux/module.h>

static int __init stand_in_init(void) { return 0; }
static void __exit stand_in_exit(void) { }

module_init(stand_in_init);
module_exit(stand_in_exit);
MODULE_DESCRIPTION("stand-in for NVIDIA's kernel module, made for a test");
MODULE_VERSION(STAND_IN_VERSION);
MODULE_LICENSE(STAND_IN_LICENSE);
