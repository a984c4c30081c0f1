//! Quantized weights of Hugging Face folders: values bit for bit as the packages that define the schemes decode them
//! (`fixtures/make_quantized.py`), and one error at a time.

use std::path::{Path, PathBuf};

use pellucid_checkpoint::Checkpoint;
use pellucid_tensor::{DType, quant};
use serde_json::{Value, json};

use crate::build::{Folder, safetensors};

fn fixtures() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/quantized");
    let entries = std::fs::read_dir(folder).expect("the fixtures are part of the repository");
    let mut folders: Vec<PathBuf> = entries.map(|entry| entry.expect("a readable folder").path()).collect();
    folders.sort();
    folders
}

fn floats(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![0.0; bytes.len() / dtype.block_bytes() * dtype.block_len()];
    quant::decode(dtype, bytes, &mut values);
    values
}

#[test]
fn every_scheme_decodes_to_the_values_of_its_package() {
    assert!(fixtures().len() >= 25);
    for folder in fixtures() {
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        let checkpoint = Checkpoint::open(&folder).unwrap_or_else(|error| panic!("{name}: {error}"));
        let checkpoint = checkpoint.with_reference_rounding();
        let tensor = &checkpoint.tensors()[0];
        let reference = match std::fs::read_to_string(folder.join("values.txt")).unwrap().trim() {
            "float16" => DType::F16,
            "bfloat16" => DType::BF16,
            _ => DType::F32,
        };
        let expected = floats(reference, &std::fs::read(folder.join("values.bin")).unwrap());
        let found = floats(tensor.dtype, &checkpoint.tensor(&tensor.name).unwrap().bytes());
        assert_eq!(tensor.num_elements(), expected.len(), "{name}");
        // GGUF's MXFP4, in which the folder's is kept, has no minus zero.
        let bits = |value: f32| if name == "mxfp4" { (value + 0.0).to_bits() } else { value.to_bits() };
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_eq!(bits(*found), bits(*expected), "{name}, number {index}: {found} is not {expected}");
        }
        // Wide rows of FP8 stay one byte a weight; everything else is decoded to the reference's format, and named.
        let is_kept = matches!(tensor.dtype, DType::F8_E4M3 | DType::MXFP4);
        assert!(is_kept || tensor.dtype == reference, "{name}: {}", tensor.dtype);
        assert!(tensor.encoding().is_some(), "{name}");
        assert!(tensor.num_bytes() < expected.len() * 2 + 128, "{name}: the bytes of the file");
    }
}

#[test]
fn integers_are_kept_in_blocks_that_hold_them_exactly() {
    let kept = [
        ("awq", DType::Q5_0),
        ("awq-whole-rows", DType::Q5_0),
        ("gptq-4", DType::Q4_0),
        ("gptq-4-asymmetric", DType::Q5_0),
        ("gptq-4-bf16", DType::Q4_0),
        ("gptq-4-v2", DType::Q5_0),
        ("gptq-4-whole-rows", DType::Q4_0),
        ("gptq-8", DType::Q8_0),
        ("int4", DType::Q4_0),
        ("int4-asymmetric", DType::Q5_0),
        ("int8-packed", DType::Q8_0),
    ];
    for folder in fixtures() {
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let tensor = &checkpoint.tensors()[0];
        let format = kept.iter().find(|(kept, _)| *kept == name).map(|(_, format)| *format);
        // The others: lists of columns, rows that are not whole blocks, floats.
        let is_in_blocks = matches!(tensor.dtype, DType::Q4_0 | DType::Q5_0 | DType::Q8_0);
        assert_eq!(is_in_blocks.then_some(tensor.dtype), format, "{name}");
        let decoded = tensor.dtype.block_len() == 1;
        assert_eq!(checkpoint.notes().iter().any(|note| note.contains("are decoded to")), decoded, "{name}");
        let Some(format) = format else { continue };
        let note = format!("are kept in {format}, with the same integers and scales");
        assert!(checkpoint.notes().iter().any(|note_of_it| note_of_it.contains(&note)), "{name}");
        // Products of integers and scales are exact in f32, and the package rounds them once.
        let values = floats(format, &checkpoint.tensor(&tensor.name).unwrap().bytes());
        let reference = checkpoint.with_reference_rounding();
        let info = &reference.tensors()[0];
        let mut rounded = vec![0; info.dtype.bytes_for(values.len()).unwrap()];
        quant::encode(info.dtype, &values, &mut rounded);
        let expected = reference.tensor(&info.name).unwrap().bytes();
        let [rounded, expected] = [&rounded[..], &expected[..]].map(|bytes| floats(info.dtype, bytes));
        assert_eq!(rounded, expected, "{name}");
    }
}

#[test]
fn scales_that_blocks_do_not_hold_are_decoded() {
    let weights = json!({ "num_bits": 8, "type": "int", "strategy": "channel", "symmetric": true });
    let config = json!({ "quant_method": "compressed-tensors", "format": "int-quantized",
        "config_groups": { "group_0": { "targets": ["Linear"], "weights": weights } } });
    // Numbers from -128 to 127, with scales of BF16: 1.0, and one that F16 does or does not hold.
    let format = |scale: u16| {
        let scales = [0x3f80, scale].into_iter().flat_map(u16::to_le_bytes).collect();
        let codes = (0..64).map(|i| if i == 0 { 0x80 } else { i * 4 }).collect();
        let parts = [("x.weight", "I8", vec![2, 32], codes), ("x.weight_scale", "BF16", vec![2, 1], scales)];
        let checkpoint = open(&config, &parts).unwrap();
        let tensor = checkpoint.tensor("x.weight").unwrap();
        let values = floats(tensor.info.dtype, &tensor.bytes());
        assert_eq!((values[0], values[31]), (-128.0, 124.0));
        tensor.info.dtype
    };
    assert_eq!(format(0x3c00), DType::Q8_0, "2^-7");
    assert_eq!(format(0x3301), DType::BF16, "2^-25 (1 + 2^-7): below the smallest number of F16");
    assert_eq!(format(0x4780), DType::BF16, "65,536: beyond the largest number of F16");
    assert_eq!(format(0x7f80), DType::BF16, "infinity");
}

#[test]
fn fp8_stays_one_byte_where_its_blocks_fit() {
    let kept = |name: &str| {
        let folder = fixtures().into_iter().find(|folder| folder.ends_with(name)).expect("a fixture");
        Checkpoint::open(&folder).unwrap().tensors()[0].dtype == DType::F8_E4M3
    };
    assert!(kept("fp8-blocks") && kept("fp8-blocks-bf16-scales") && kept("fp8-tensor") && kept("float8-tensor-f32"));
    assert!(!kept("fp8-small-blocks"), "blocks of 32 columns");
    assert!(!kept("float8-channel"), "the reference rounds products to BF16");
}

/// A part of a quantized weight: name, type, shape, bytes.
type Part = (&'static str, &'static str, Vec<usize>, Vec<u8>);

fn put(folder: &Folder, config: &Value, parts: &[Part]) {
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    for (name, dtype, shape, bytes) in parts {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert((*name).into(), json!({ "dtype": dtype, "shape": shape, "data_offsets": offsets }));
        data.extend(bytes);
    }
    folder.put("model.safetensors", &safetensors(&Value::Object(header).to_string(), &data));
    let config = json!({ "model_type": "llama", "quantization_config": config });
    folder.put("config.json", config.to_string().as_bytes());
}

fn open(config: &Value, parts: &[Part]) -> Result<Checkpoint, String> {
    let folder = Folder::hugging_face();
    put(&folder, config, parts);
    folder.open().map_err(|error| error.to_string())
}

/// Four bits, 16 inputs in two groups, 8 outputs.
fn gptq() -> (Value, Vec<Part>) {
    let config = json!({ "quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": true, "sym": false });
    let groups = [0i32, 1].repeat(8).into_iter().flat_map(i32::to_le_bytes).collect();
    let one = [0x00, 0x3c].repeat(16);
    let parts = vec![
        ("x.qweight", "I32", vec![2, 8], vec![0x21; 64]),
        ("x.qzeros", "I32", vec![2, 1], vec![0; 8]),
        ("x.scales", "F16", vec![2, 8], one),
        ("x.g_idx", "I32", vec![16], groups),
    ];
    (config, parts)
}

#[test]
fn zero_points_of_version_1_are_one_more_and_carry() {
    let (config, mut parts) = gptq();
    // Zero points 0 and 5 of adjacent outputs: the subtraction of 0x11 from 0x50 borrows.
    parts[1].3 = [0x3f, 0, 0, 0].repeat(2);
    let checkpoint = open(&config, &parts).unwrap();
    let values = floats(DType::F16, &checkpoint.tensor("x.weight").unwrap().bytes());
    assert_eq!((values[0], values[1]), (1.0, 2.0), "output 0, zero point 0");
    assert_eq!((values[16], values[17]), (-4.0, -3.0), "output 1, zero point 5");
    let mut second = config;
    second["checkpoint_format"] = json!("gptq_v2");
    parts[1].3 = [0x50, 0, 0, 0].repeat(2);
    let checkpoint = open(&second, &parts).unwrap();
    let values = floats(DType::F16, &checkpoint.tensor("x.weight").unwrap().bytes());
    assert_eq!((values[0], values[16]), (1.0, -4.0), "zero points 0 and 5 as they are");
}

#[test]
fn parts_that_are_missing_or_of_another_shape_or_type_are_named() {
    let (config, parts) = gptq();
    assert!(open(&config, &parts).is_ok());
    for index in 1..parts.len() {
        let mut fewer = parts.clone();
        let (name, ..) = fewer.remove(index);
        let message = open(&config, &fewer).unwrap_err();
        assert!(message.contains("x.qweight") && message.contains(name), "{message}");
    }
    for (index, (name, dtype, shape, bytes)) in parts.iter().enumerate().skip(1) {
        let width = bytes.len() / shape.iter().product::<usize>();
        let mut other = parts.clone();
        other[index].2[0] += 1;
        let len = other[index].2.iter().product::<usize>() * width;
        other[index].3.resize(len, 0);
        let message = open(&config, &other).unwrap_err();
        assert!(message.contains(name) && message.contains("expected"), "{message}");
        let mut other = parts.clone();
        other[index].1 = if *dtype == "F16" { "I8" } else { "F32" };
        other[index].3 = vec![0; if *dtype == "F16" { bytes.len() / 2 } else { bytes.len() }];
        let message = open(&config, &other).unwrap_err();
        assert!(message.contains(name) && message.contains("unsupported type"), "{message}");
    }
    let mut beyond = parts.clone();
    beyond[3].3[4] = 2;
    let message = open(&config, &beyond).unwrap_err();
    assert!(message.contains("x.g_idx") && message.contains("groups that have scales"), "{message}");
    let mut negative = parts.clone();
    negative[3].3[4..8].fill(0xff);
    assert!(open(&config, &negative).is_err());
    let mut in_order = config;
    in_order["desc_act"] = json!(false);
    let message = open(&in_order, &parts).unwrap_err();
    assert!(message.contains("desc_act in config.json is false"), "{message}");
    let mut left_over = parts;
    left_over.push(("y.qzeros", "I32", vec![1], vec![0; 4]));
    let message = open(&gptq().0, &left_over).unwrap_err();
    assert!(message.contains("y.qzeros") && message.contains("unsupported type"), "{message}");
}

#[test]
fn a_stated_shape_must_be_that_of_the_packed_weight() {
    let weights = json!({ "num_bits": 4, "type": "int", "strategy": "channel", "symmetric": true });
    let config = json!({ "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": { "group_0": { "targets": ["Linear"], "weights": weights } } });
    let parts = |rows: u64, cols: u64| -> Vec<Part> {
        vec![
            ("x.weight_packed", "I32", vec![2, 2], vec![0; 16]),
            ("x.weight_scale", "BF16", vec![2, 1], vec![0; 4]),
            ("x.weight_shape", "I64", vec![2], [rows, cols].into_iter().flat_map(u64::to_le_bytes).collect()),
        ]
    };
    assert_eq!(open(&config, &parts(2, 12)).unwrap().tensors()[0].shape, [2, 12]);
    for (rows, cols) in [(2, 8), (2, 17), (0, 16), (2, 0), (3, 16), (u64::MAX, 16), (2, 1 << 62), (1 << 33, 1 << 33)] {
        assert!(open(&config, &parts(rows, cols)).is_err(), "{rows} x {cols}");
    }
}

#[test]
fn settings_that_are_not_supported_are_refused_with_their_key() {
    let int4 = json!({ "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32 });
    let compressed = |format: &str, weights: &Value| json!({ "quant_method": "compressed-tensors", "format": format, "config_groups": { "a": { "weights": weights } } });
    let with = |mut config: Value, pointer: &str, value: Value| {
        let (object, key) = pointer.rsplit_once('/').unwrap();
        config.pointer_mut(object).unwrap()[key] = value;
        config
    };
    let base = json!({ "quant_method": "gptq", "bits": 4, "group_size": 128 });
    let awq = json!({ "quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": true });
    let fp8 = json!({ "quant_method": "fp8", "weight_block_size": [128, 128] });
    let packed = compressed("pack-quantized", &int4);
    for config in [&base, &awq, &fp8, &packed, &json!({ "quant_method": "mxfp4" })] {
        assert!(open(config, &[]).is_ok(), "{config}");
    }
    let cases = [
        (json!({ "quant_method": "bitsandbytes" }), "quant_method", "\"bitsandbytes\""),
        (json!({ "bits": 4 }), "quant_method", "none"),
        (with(base.clone(), "/bits", json!(3)), "bits", "3"),
        (with(base.clone(), "/group_size", json!(0)), "group_size", "0"),
        (with(base.clone(), "/checkpoint_format", json!("marlin")), "checkpoint_format", "\"marlin\""),
        (with(base.clone(), "/dynamic", json!({ "+:x": {} })), "dynamic", "an object"),
        (with(base.clone(), "/pack_dtype", json!("int8")), "pack_dtype", "\"int8\""),
        (with(base.clone(), "/is_marlin_format", json!(true)), "is_marlin_format", "true"),
        (with(awq.clone(), "/bits", json!(8)), "bits", "8"),
        (with(awq.clone(), "/version", json!("gemv")), "version", "\"gemv\""),
        (with(awq.clone(), "/zero_point", json!(false)), "zero_point", "false"),
        (with(fp8.clone(), "/fmt", json!("e5m2")), "fmt", "\"e5m2\""),
        (with(fp8.clone(), "/weight_block_size", json!([128, 0])), "weight_block_size", "a list"),
        (with(fp8.clone(), "/weight_block_size", json!([128])), "weight_block_size", "a list"),
        (with(packed.clone(), "/format", json!("marlin-24")), "format", "\"marlin-24\""),
        (with(packed.clone(), "/config_groups/a/weights", json!(null)), "config_groups.a.weights", "none"),
        (with(packed.clone(), "/config_groups/a/weights/num_bits", json!(2)), "weights.num_bits", "2"),
        (with(packed.clone(), "/config_groups/a/weights/type", json!("float")), "weights.type", "\"float\""),
        (with(packed.clone(), "/config_groups/a/weights/strategy", json!("token")), "weights.strategy", "\"token\""),
        (with(packed.clone(), "/config_groups/a/weights/dynamic", json!(true)), "weights.dynamic", "true"),
        (with(packed.clone(), "/config_groups", json!({})), "config_groups", "none"),
        (with(packed.clone(), "/quantization_status", json!("frozen")), "quantization_status", "\"frozen\""),
        (
            with(packed.clone(), "/sparsity_config", json!({ "format": "sparse-24-bitmask" })),
            "sparsity_config.format",
            "24",
        ),
        (with(packed, "/transform_config", json!({ "a": 1 })), "transform_config", "an object"),
        (compressed("int-quantized", &int4), "weights.num_bits", "4"),
    ];
    for (config, key, found) in cases {
        let message = open(&config, &[]).expect_err(&config.to_string());
        assert!(message.contains("config.json") && message.contains("quantization_config"), "{message}");
        assert!(message.contains(key) && message.contains(found), "{message}");
    }
}

#[test]
fn scales_of_activations_are_left_out_and_named() {
    let config = json!({ "quant_method": "fp8", "activation_scheme": "static" });
    let parts: Vec<Part> = vec![
        ("x.weight", "F8_E4M3", vec![2, 4], vec![0x38; 8]),
        ("x.weight_scale", "F32", vec![], 2f32.to_le_bytes().to_vec()),
        ("x.input_scale", "F32", vec![], 1f32.to_le_bytes().to_vec()),
    ];
    let checkpoint = open(&config, &parts).unwrap();
    assert_eq!(checkpoint.tensors().len(), 1);
    assert_eq!(floats(DType::F32, &checkpoint.tensor("x.weight").unwrap().bytes()), [2.0; 8]);
    assert!(
        checkpoint.notes().iter().any(|note| note.starts_with("1 scales of activations")),
        "{:?}",
        checkpoint.notes()
    );
    let message = open(&config, &parts[..1]).unwrap_err();
    assert!(message.contains("x.weight_scale_inv"), "{message}");
}
