//! A mapped file that is truncated while a process reads it: the process ends, and says which file it was.
#![cfg(target_os = "linux")]

use std::collections::HashMap;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use pellucid_checkpoint::{Checkpoint, FileAccess, report_bus_errors};

/// Variables that turn the test `child` into the process that is attacked.
const FILE: &str = "PELLUCID_TEST_TRUNCATED_FILE";
const WAY: &str = "PELLUCID_TEST_TRUNCATED_WAY";

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../pellucid/models/tiny.gguf");

/// Opens a model, truncates its file, and reads all weights. A test of its own when it runs without the variables.
#[test]
fn child() {
    let Some(path) = std::env::var_os(FILE).map(PathBuf::from) else { return };
    let way = std::env::var(WAY).unwrap();
    let access = match way.as_str() {
        "memory" => FileAccess::InMemory { sha256: HashMap::new() },
        _ => FileAccess::Mapped,
    };
    if way != "silent" {
        report_bus_errors();
    }
    // Two more maps, one of them dropped: the message must name the right file.
    let other = Checkpoint::open(Path::new(MODEL)).unwrap();
    drop(Checkpoint::open(Path::new(MODEL)).unwrap());
    let model = Checkpoint::open_with(&path, &access).unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(4096).unwrap();
    if way == "signal" {
        // A signal from elsewhere is not about a mapped file.
        let kill = Command::new("kill").args(["-BUS", &std::process::id().to_string()]).status().unwrap();
        assert!(kill.success());
        std::thread::sleep(std::time::Duration::from_secs(60));
    }
    let sum = |model: &Checkpoint| -> u64 {
        let names = model.tensors().iter().map(|tensor| model.tensor(&tensor.name).unwrap());
        names.map(|tensor| tensor.bytes().iter().map(|byte| u64::from(*byte)).sum::<u64>()).sum()
    };
    assert_eq!(sum(&model), sum(&other));
    println!("read everything");
}

fn attack(way: &str) -> (Output, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("attacked model.gguf");
    std::fs::copy(MODEL, &path).unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--nocapture"]).env(FILE, &path).env(WAY, way);
    (command.output().unwrap(), path)
}

#[test]
fn the_last_line_names_the_file() {
    let (output, path) = attack("reported");
    assert_eq!(output.status.signal(), Some(7), "{output:?}");
    let stderr = String::from_utf8(output.stderr).unwrap();
    let line = format!("error: {}: the mapped file was truncated", path.display());
    assert!(stderr.lines().last().unwrap().starts_with(&line), "{stderr:?}");
}

/// Positive control: without the handler the same signal comes, and nothing is said.
#[test]
fn without_the_handler_the_process_dies_silently() {
    let (output, _) = attack("silent");
    assert_eq!(output.status.signal(), Some(7), "{output:?}");
    assert!(!String::from_utf8(output.stderr).unwrap().contains("truncated"));
}

#[test]
fn a_signal_from_elsewhere_names_no_file() {
    let (output, _) = attack("signal");
    assert_eq!(output.status.signal(), Some(7), "{output:?}");
    assert!(!String::from_utf8(output.stderr).unwrap().contains("truncated"));
}

#[test]
fn a_model_in_memory_does_not_notice() {
    let (output, _) = attack("memory");
    assert!(
        output.status.success() && String::from_utf8_lossy(&output.stdout).contains("read everything"),
        "{output:?}"
    );
}
