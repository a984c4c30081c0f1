//! APIs other than OpenAI's, which become requests of OpenAI's and answer in their own form.

mod anthropic;
mod background;
mod bad_input;
mod llama_cpp;
mod ollama;
mod responses;
mod responses_db;
mod stored_bytes;
