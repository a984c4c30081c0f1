//! The terminal: standard input and output, the log, Ctrl-C, and numbers, sizes and tokens as people read them.

pub(crate) mod cells;
pub(crate) mod format;
pub(crate) mod interrupt;
pub(crate) mod loading_bar;
pub(crate) mod log;
mod log_queue;
pub(crate) mod output;
pub(crate) mod spelling;
pub(crate) mod stdin;
pub(crate) mod token_table;
pub(crate) mod word_wrap;
