//! `--ranks`: replies of several groups of threads, and what is refused. `tests/ranks` has the ranks of `mpiexec`.

use crate::support::Home;

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../pellucid/models/tiny.gguf");

fn run(home: &Home, more: &[&str]) -> String {
    let words = ["run", "--model", TINY, "--device", "cpu", "-n", "24", "--seed", "5", "--raw", "Once upon a time"];
    home.run(&[&words[..], more].concat()).ok().to_owned()
}

#[test]
fn groups_of_threads_give_the_reply_of_one_rank() {
    let home = Home::new();
    let alone = run(&home, &[]);
    for ranks in ["1", "2", "3"] {
        assert_eq!(run(&home, &["--ranks", ranks]), alone, "{ranks} ranks");
    }
}

#[test]
fn prove_compares_ranks_with_one_thread_of_one_rank() {
    let home = Home::new();
    let words = ["prove", TINY, "--device", "cpu", "--ranks", "2", "--prompts", "4", "--longest", "20", "--reply", "4"];
    let ran = home.run(&[&words[..], &["--together", "3"]].concat());
    assert!(ran.ok().contains("one thread") && ran.ok().contains("proved"), "{ran:?}");
}

#[test]
fn bench_reports_the_gathers_between_ranks() {
    let home = Home::new();
    let words = ["bench", TINY, "--device", "cpu", "--prompt", "8", "--generate", "4", "--repeat", "1", "--json"];
    let result = |more: &[&str]| -> serde_json::Value {
        serde_json::from_str(home.run(&[&words[..], more].concat()).ok()).expect("JSON")
    };
    assert!(result(&[])["speed"][0]["gathers"].is_null());
    let gathers = &result(&["--ranks", "2"])["speed"][0]["gathers"];
    assert!(gathers["number"].as_f64() > Some(0.0) && gathers["bytes"].as_f64() > Some(0.0), "{gathers}");
}

#[test]
fn ranks_that_cannot_be_are_refused() {
    let home = Home::new();
    for wrong in ["0", "65", "two", "-1"] {
        let ran = home.run(&["run", "--model", TINY, &format!("--ranks={wrong}"), "x"]);
        assert!(ran.usage().contains("expected mpi, or a number from 1 to 64"), "{ran:?}");
    }
    let text = home.path().join("text.txt");
    std::fs::write(&text, "Once upon a time there was a little girl. ".repeat(4)).unwrap();
    let ran = home.run(&["perplexity", TINY, text.to_str().unwrap(), "--device", "cpu", "--ranks", "2"]);
    assert!(ran.usage().contains("--ranks: this command computes on one rank"), "{ran:?}");
    let ran = home.run(&["run", "--model", TINY, "--device", "cpu", "--ranks", "64", "x"]);
    assert!(ran.error().contains("64 ranks cannot share"), "{ran:?}");
    let words = ["run", "--model", TINY, "--ranks", "mpi", "--mpi-library", "/nowhere/libmpi_abi.so.1", "x"];
    let ran = home.run(&words);
    assert!(ran.error().contains("no MPI library with the standard ABI was found"), "{ran:?}");
}
