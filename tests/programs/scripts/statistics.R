# R: a fitted model, the random number generator's state, a file that is open, and a closure.
folder <- commandArgs(trailingOnly = TRUE)[1]
set.seed(42)
data <- data.frame(x = rnorm(5000))
data$y <- 3 * data$x + rnorm(5000)
model <- lm(y ~ x, data)
coefficients <- coef(model)
log <- file(file.path(folder, "log"), "w")
make <- function() { count <- 0; function() { count <<- count + 1; count } }
count <- make()
twin <- .Random.seed
number <- 0
repeat {
  while (!file.exists(file.path(folder, paste0("ask-", number)))) Sys.sleep(0.02)
  writeLines(paste("line", number), log)
  flush(log)
  drawn <- rnorm(3)
  kept <- .Random.seed
  .Random.seed <- twin
  same <- identical(drawn, rnorm(3))
  twin <- .Random.seed
  good <- same && identical(kept, twin) && identical(coef(lm(y ~ x, data)), coefficients) && count() == number + 1 &&
    length(readLines(file.path(folder, "log"))) == number + 1
  writeLines(if (good) "as it was" else paste("same", same), file.path(folder, "draft"), sep = "")
  file.rename(file.path(folder, "draft"), file.path(folder, paste0("answer-", number)))
  number <- number + 1
}
