//! The built program, run as a user runs it.

mod bench_and_prove;
mod chat_template;
mod devices;
mod embed;
mod explain;
mod files;
mod formats;
mod inspect_and_tokenize;
mod ranks;
mod run;
mod serve;
mod several_models;
mod speculate;
mod support;
mod unwritable_output;
mod usage;
