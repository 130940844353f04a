// ZeRO-3 with optimizer states and parameters in files. DeepSpeed builds its operator for it at
// first use, which needs a C++ compiler and libaio's headers (Debian's package libaio-dev).

(import "verse_classifier.jsonnet") + {
  "type": "deepspeed",
  "trainer"+: {
    // The files are in the folder "nvme" of the serialization directory. Where that is not on the
    // NVMe device, name a folder: {"type": "zero_3_nvme", "zero_optimization":
    // {"offload_optimizer": {"nvme_path": "/nvme"}, "offload_param": {"nvme_path": "/nvme"}}}.
    "deepspeed_config": "zero_3_nvme",
  },
}
